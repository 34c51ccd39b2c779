"""Parquet and CSV hold what the records hold, as far as the format can."""

from __future__ import annotations

import csv
import hashlib
import io
import itertools
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.examples import examples
from tests.unit.pipeline.sinks.sink_parts import Rows, cuts, flat, parts_of

from muster.base.errors import UsageError
from muster.pipeline.sinks import columnar
from muster.pipeline.sinks.formats import SinkSpec, encoder_for, read_output
from muster.pipeline.sinks.merge import merge, write_the_output
from muster.pipeline.sinks.parts import Part


def write(folder: Path, name: str, shards: list[list[Rows]], **columns: str) -> tuple[str, ...]:
    """Returns the notes. A merge writes Parquet in a process of its own, which costs ten times as
    much as what is looked at here.
    """
    parts = parts_of(folder / "parts", shards)
    _, notes = write_the_output(parts, sink(folder, name, **columns), folder / name)
    return notes


def sink(folder: Path, name: str, **columns: str) -> SinkSpec:
    path = folder / name
    format: Any = path.suffix[1:]
    return SinkSpec(path=path, format=format, columns=tuple(columns.items()))


def same(found: Any, meant: Any) -> bool:
    """Equal but for what is documented: integers as floats, keys that a struct lacks as null."""
    if isinstance(meant, dict) and isinstance(found, dict):
        return set(meant) <= set(found) and all(
            same(value, meant.get(name)) for name, value in found.items()
        )
    if isinstance(meant, list) and isinstance(found, list):
        return len(found) == len(meant) and all(map(same, found, meant))
    if type(found) is float and type(meant) is int:
        return int(found) == meant
    return type(found) is type(meant) and bool(found == meant)


@examples(100)
@given(cuts)
@example([[[{"a": 1}], [{"a": 2.5}]]])
@example([[[{"a": 2**53 + 1}], [{"a": 2.5}]]])
@example([[[{"a": {}}], [{"a": None}]]])
@example([[[{"a": [[], [{"x": {}}]]}], [{"a": []}]]])
@example([[[{"a": {"x": 1}}], [{"a": {"y": "t"}}]]])
@example([[[{"": True, "a.b": "\x00"}], [{}]]])
def test_parquet_holds_the_records(
    tmp_path_factory: pytest.TempPathFactory, shards: list[list[Rows]]
) -> None:
    folder = tmp_path_factory.mktemp("formats")
    rows = flat(shards)
    if rows and not any(rows):
        with pytest.raises(UsageError, match="No record has any column"):
            write(folder, "out.parquet", shards)
        return
    notes = write(folder, "out.parquet", shards)
    found = list(read_output(sink(folder, "out.parquet")))
    assert len(found) == len(rows)
    names = list(dict.fromkeys(name for row in rows for name in row))
    for one, meant in zip(found, rows, strict=True):
        assert list(one) == names
        assert same(one, meant), (one, meant)
    schema = pq.read_schema(folder / "out.parquet")
    texts = {name for name in names if columnar.is_json_text(schema.field(name))}
    noted = {name for name in names if any(f"column {name!r} is JSON" in n for n in notes)}
    assert noted == texts
    kinds = {name: {type(row.get(name)) for row in rows} - {type(None)} for name in names}
    for name in names:
        if len(kinds[name]) == 1 and kinds[name] <= {str, bool, int, float}:
            assert name not in texts, "a column of one simple type needs no JSON"
        if len(kinds[name]) > 1 and kinds[name] != {int, float}:
            assert name in texts


def test_types_are_those_of_all_parts(tmp_path: Path) -> None:
    shards: list[list[Rows]] = [
        [[{"f": 1, "i": 1, "n": None, "late": None}], [{"f": 0.5, "l": [1, None]}]],
        [[{"late": [{"x": 1}]}, {"late": [{"y": [True]}], "mix": "t"}], [{"mix": 3}]],
        [[{"huge": 2**64 - 1}]],
    ]
    notes = write(tmp_path, "out.parquet", shards)
    schema = pq.read_schema(tmp_path / "out.parquet")
    assert {field.name: str(field.type) for field in schema} == {
        "f": "double",
        "i": "int64",
        "n": "string",
        "late": "list<element: struct<x: int64, y: list<element: bool>>>",
        "l": "list<element: int64>",
        "mix": "string",
        "huge": "string",
    }
    assert notes == (
        "column 'mix' is JSON text: its values are integer and text",
        "column 'huge' is JSON text: its values are integers beyond 64 bits with a sign",
    )
    table = pq.read_table(tmp_path / "out.parquet")
    assert [v for v in table["mix"].to_pylist() if v is not None] == ['"t"', "3"]


def test_integers_of_any_size_keep_their_digits(tmp_path: Path) -> None:
    line = b'{"a":%d,"b":[%d],"c":1.5}\n' % (10**40, -(2**70))
    rows = tmp_path / "part.jsonl"
    rows.write_bytes(line + b'{"a":1,"b":[],"c":2}\n')
    data = rows.read_bytes()
    one = Part(0, 0, 2, rows, 2, len(data), hashlib.sha256(data).hexdigest(), None, 0)
    meant = [{"a": 10**40, "b": [-(2**70)], "c": 1.5}, {"a": 1, "b": [], "c": 2}]
    for name in ("out.parquet", "out.csv"):
        encoder = encoder_for(sink(tmp_path, name), [one])
        with (tmp_path / name).open("wb") as file:
            encoder.write([one], file)
    table = pq.read_table(tmp_path / "out.parquet").to_pylist()
    found = [{"a": json.loads(r["a"]), "b": json.loads(r["b"]), "c": r["c"]} for r in table]
    assert found == meant
    with (tmp_path / "out.csv").open(newline="") as file:
        read = [{k: json.loads(v) for k, v in row.items()} for row in csv.DictReader(file)]
    assert read == meant
    (tmp_path / "out.jsonl").write_bytes(data)
    for name in ("out.jsonl", "out.parquet", "out.csv"):  # a recipe sums these up
        again = list(read_output(sink(tmp_path, name)))
        assert again == meant
        assert type(again[0]["b"][0]) is int


def test_a_struct_with_data_for_keys_is_json_text(tmp_path: Path) -> None:
    rows = [{"scores": {f"user-{n}": n}} for n in range(800)]
    write(tmp_path, "out.parquet", [[rows]])
    assert pq.read_schema(tmp_path / "out.parquet").field("scores").type == pa.string()
    assert list(read_output(sink(tmp_path, "out.parquet"))) == rows


def test_declared_columns_win(tmp_path: Path) -> None:
    rows: Rows = [{"v": [1, 2.5], "k": 1, "w": ["a"]}, {"v": None, "k": 2}, {"v": [3, 4]}]
    write(
        tmp_path, "out.parquet", [[rows]],
        v="float32[2]", k="int8", w="string[]", none="int32", stars="float32[*]",
    )  # fmt: skip
    schema = pq.read_schema(tmp_path / "out.parquet")
    # With a null beside them: pyarrow up to 25 cannot read lists of one length then.
    assert schema.field("v").type == pa.list_(pa.field("element", pa.float32()))
    assert schema.field("k").type == pa.int8()
    assert schema.field("w").type == pa.list_(pa.field("element", pa.string()))
    assert schema.field("none").type == pa.int32()
    assert schema.field("stars").type == pa.list_(pa.field("element", pa.float32()))
    table = pq.read_table(tmp_path / "out.parquet")
    assert table["v"].to_pylist() == [[1, 2.5], None, [3, 4]]
    assert table["k"].to_pylist() == [1, 2, None]
    for name, kind in (("again", "float32[*]"), ("so", "float32[2]")):
        write(tmp_path, f"{name}.parquet", [[[rows[0], rows[2]]]], v=kind)
        there = pq.read_table(tmp_path / f"{name}.parquet")["v"]
        assert there.type.list_size == 2
        assert there.to_pylist() == [[1, 2.5], [3, 4]]
    with pytest.raises(UsageError, match="declared as float32"):
        write(tmp_path, "odd.parquet", [[[*rows, {"v": [1, 2, 3]}]]], v="float32[2]")


MISFITS = [
    ("float32[3]", [1.0, 2.0]),
    ("float32[*]", [1.0]),
    ("float32", "text"),
    ("float32", 1e300),
    ("float32[2]", [1e300, 0.0]),
    ("int32", 2**40),
    ("int32", 1.5),
    ("string", 7),
    ("bool", "yes"),
    ("float32", True),
    ("int32[]", [1, 2.5]),
    ("string[]", "abc"),
]


@pytest.mark.parametrize(("kind", "value"), MISFITS)
def test_a_value_that_does_not_fit_is_named(tmp_path: Path, kind: str, value: Any) -> None:
    good: dict[str, Any] = {"float32[3]": [0, 0, 0], "float32[*]": [0, 0]}
    rows = [{"id": "a", "v": good.get(kind)}, {"id": "b", "v": None}, {"id": "c", "v": value}]
    with pytest.raises(UsageError, match="The column 'v' is declared as") as caught:
        write(tmp_path, "out.parquet", [[rows[:1], rows[1:]]], v=kind)
    assert kind in str(caught.value)
    assert f"{value!r}" in str(caught.value)
    assert "(id 'c', line 2 of" in str(caught.value)


def test_a_value_that_does_not_fit_leaves_no_output(tmp_path: Path) -> None:
    """The error comes from the process that writes."""
    parts = parts_of(tmp_path / "parts", [[[{"id": "c", "v": "text"}]]])
    with pytest.raises(UsageError, match="'v' is declared as int8") as caught:
        merge(parts, sink(tmp_path, "out.parquet", v="int8"), errors=tmp_path / "errors.jsonl")
    assert "(id 'c', line 1 of" in str(caught.value)
    assert not (tmp_path / "out.parquet").exists()


@pytest.mark.parametrize("kind", ["", "float", "float32[", "float32[3][2]", "struct"])
def test_an_unknown_type_is_refused(tmp_path: Path, kind: str) -> None:
    with pytest.raises(UsageError, match="which is not a type"):
        write(tmp_path, "out.parquet", [[[{"v": 1}]]], v=kind)


def test_row_groups_are_bounded_for_many_rows_and_for_wide_ones(tmp_path: Path) -> None:
    many = [{"n": n} for n in range(130_000)]
    write(tmp_path, "many.parquet", [[many]])
    # Every row is 64 KiB of floats; all of them are more than one group may be.
    wide: Rows = [{"v": [0.5] * 8192}] * 200
    write(tmp_path, "wide.parquet", [[wide[:100], wide[100:]]], v="float64[]")
    for name, count in (("many", len(many)), ("wide", len(wide))):
        file = pq.ParquetFile(tmp_path / f"{name}.parquet").metadata
        sizes = [file.row_group(n).num_rows for n in range(file.num_row_groups)]
        assert sum(sizes) == count
        assert len(sizes) == 2
        assert sizes[0] <= 101_024 if name == "many" else 110 <= sizes[0] <= 170


wide_rows = st.lists(
    st.fixed_dictionaries(
        {"n": st.integers(0, 9), "text": st.text("ab\u00e4", max_size=90)},
        optional={"list": st.lists(st.floats(0, 1), max_size=9), "deep": st.just({"x": ["yz"]})},
    ),
    min_size=20,
    max_size=60,
)


@examples(40)
@given(wide_rows, st.sets(st.integers(1, 59)), st.sets(st.integers(1, 59)))
def test_parquet_has_the_same_bytes_wherever_parts_end(
    tmp_path_factory: pytest.TempPathFactory, rows: Rows, one: set[int], two: set[int]
) -> None:
    folder, found = tmp_path_factory.mktemp("cut"), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(columnar, "GROUP_BYTES", 200)
        for name, places in (("one", one), ("two", two)):
            ends = [0, *sorted(n for n in places if n < len(rows)), len(rows)]
            parts = parts_of(folder / name, [[rows[a:b] for a, b in itertools.pairwise(ends)]])
            encoder = encoder_for(sink(folder, "out.parquet"), parts)
            with io.BytesIO() as file:
                encoder.write(parts, file)
                found.append(file.getvalue())
    assert found[0] == found[1]
    groups = pq.ParquetFile(pa.BufferReader(found[0])).metadata
    sizes = [groups.row_group(n).num_rows for n in range(groups.num_row_groups)]
    assert max(sizes) <= 200 // 16 + 1


@examples(60)
@given(cuts)
@example([[[{"a": ""}], [{"a": "x\r\ny"}, {"a": 'q"q', "b": ","}]]])
@example([[[{"a": None}], [{}]]])
def test_csv_comes_back_through_the_csv_module(
    tmp_path_factory: pytest.TempPathFactory, shards: list[list[Rows]]
) -> None:
    folder = tmp_path_factory.mktemp("formats")
    write(folder, "out.csv", shards)
    with (folder / "out.csv").open(newline="", encoding="utf-8") as file:
        header, *found = list(csv.reader(file))
    rows = flat(shards)
    assert header == list(dict.fromkeys(name for row in rows for name in row))
    assert len(found) == len(rows)
    for cells, meant in zip(found, rows, strict=True):
        for name, cell in zip(header, cells, strict=True):
            value = meant.get(name)
            if isinstance(value, str):
                assert cell == value
            elif value is None:
                assert cell == ""
            else:
                assert json.loads(cell) == value
    data = (folder / "out.csv").read_bytes()
    assert data.endswith(b"\r\n")


def test_a_folder_of_parquet_has_one_schema(tmp_path: Path) -> None:
    spec = SinkSpec(path=tmp_path / "out", format="parquet", is_folder=True)
    shards: list[list[Rows]] = [[[{"a": 1}]], [[{"a": 0.5, "b": "t"}], [{"c": True}]]]
    merge(parts_of(tmp_path / "parts", shards), spec, errors=tmp_path / "errors.jsonl")
    schemas = [pq.read_schema(path) for path in sorted(spec.path.glob("*.parquet"))]
    assert len(schemas) == 2
    assert schemas[0] == schemas[1]
    assert [row["a"] for row in read_output(spec)] == [1.0, 0.5, None]
