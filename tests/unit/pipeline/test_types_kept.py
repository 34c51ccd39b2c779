"""Parquet in, Parquet out: a column that no stage has touched is what it was, byte for byte."""

from __future__ import annotations

import datetime
import decimal
import io
import itertools
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.pipeline.chunks_here import run_chunks

from muster.pipeline.sinks import columnar
from muster.pipeline.sinks.formats import SinkSpec, encoder_for
from muster.pipeline.sources.source import Selection
from muster.pipeline.sources.table import open_input


def mapped(table: pa.Table, place: Path, stage: str = "same", **how: Any) -> pa.Table:
    """What reader, stage, journal and writer make of a Parquet file of this table."""
    pq.write_table(table, place / "in.parquet", row_group_size=7)
    selection = how.pop("selection", Selection())
    source = open_input(place / "in.parquet", selection, folder=place / "input")
    how = {"keeps_types": True, "keeps_ids": False, "batch_size": 4, **how}
    done = run_chunks(source, place, stage, **how)
    assert not any(result["rejected"] for result in done.results)
    return pq.read_table(done.merged(source, place / "out.parquet"))


def raw(array: Any) -> list[Any]:
    """Values that can be compared: NaN and -0.0 by their bytes, times as they are stored."""
    kind, types = array.type, pa.types
    if types.is_dictionary(kind):
        return raw(array.dictionary_decode())
    if types.is_struct(kind):
        fields = [raw(array.field(i)) for i in range(kind.num_fields)]
        rows = list(zip(*fields, strict=True)) or [()] * len(array)
        return [r if v else None for r, v in zip(rows, array.is_valid().to_pylist(), strict=True)]
    if types.is_nested(kind):
        return [raw(_items(scalar)) if scalar.is_valid else None for scalar in array]
    if types.is_temporal(kind):
        wide = pa.int32() if kind.bit_width == 32 else pa.int64()
        return array.view(wide).to_pylist()  # type: ignore[no-any-return]
    if types.is_floating(kind):
        return [None if v is None else struct.pack("d", v) for v in array.to_pylist()]
    return array.to_pylist()  # type: ignore[no-any-return]


def _items(scalar: Any) -> Any:
    values = scalar.values
    return values if isinstance(values, pa.Array) else pa.array(values)


def check_same(found: pa.Table, expected: pa.Table) -> None:
    assert found.schema.equals(expected.schema, check_metadata=True)
    for name in expected.schema.names:
        one, two = found[name].combine_chunks(), expected[name].combine_chunks()
        assert one.type == two.type
        assert raw(one) == raw(two), name


# ---------------------------------------------------------------------- every type there is

ZONES = (None, "UTC", "Europe/Berlin", "+01:30")
BITS = {"s": 40, "ms": 60, "us": 62, "ns": 62}


def _stored(kind: Any, width: Any, values: st.SearchStrategy[int]) -> tuple[Any, Any]:
    return kind, lambda items: pa.array(items, width).view(kind), values  # type: ignore[return-value]


def _simple() -> list[tuple[Any, Callable[[list[Any]], Any], st.SearchStrategy[Any]]]:
    """A type, how to make an array of it, and from which values."""

    def plain(kind: Any, values: st.SearchStrategy[Any]) -> Any:
        return kind, lambda items: pa.array(items, kind), values

    def wide(bits: int) -> st.SearchStrategy[int]:
        return st.integers(-(1 << bits), 1 << bits)

    found = [plain(pa.bool_(), st.booleans()), plain(pa.null(), st.none())]
    for bits in (8, 16, 32, 64):
        most = (1 << bits) - 1
        found.append(plain(getattr(pa, f"uint{bits}")(), st.integers(0, most)))
        signed = st.integers(-(1 << (bits - 1)), (1 << (bits - 1)) - 1)
        found.append(plain(getattr(pa, f"int{bits}")(), signed))
    for bits in (16, 32, 64):
        found.append(plain(getattr(pa, f"float{bits}")(), st.floats(width=bits)))  # type: ignore[arg-type]
    text = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
    found += [plain(pa.string(), text), plain(pa.large_string(), text)]
    found += [plain(kind, st.binary(max_size=5)) for kind in (pa.binary(), pa.large_binary())]
    found.append(plain(pa.binary(3), st.binary(min_size=3, max_size=3)))
    cents = st.integers(-(10**11), 10**11).map(lambda n: decimal.Decimal(n) / 100)
    found += [plain(pa.decimal128(12, 2), cents), plain(pa.decimal256(50, 2), cents)]
    found.append(_stored(pa.date32(), pa.int32(), wide(30)))
    days = wide(30).map(lambda n: n * 86_400_000)
    found.append(_stored(pa.date64(), pa.int64(), days))
    found.append(_stored(pa.time32("s"), pa.int32(), st.integers(0, 86_399)))
    found.append(_stored(pa.time32("ms"), pa.int32(), st.integers(0, 86_399_999)))
    found.append(_stored(pa.time64("us"), pa.int64(), st.integers(0, 86_399_999_999)))
    found.append(_stored(pa.time64("ns"), pa.int64(), st.integers(0, 86_399_999_999_999)))
    for unit, bits in BITS.items():
        found.append(_stored(pa.duration(unit), pa.int64(), wide(bits)))
        found += [_stored(pa.timestamp(unit, tz=z), pa.int64(), wide(bits)) for z in ZONES]
    for index in (pa.int8(), pa.int32()):
        kind = pa.dictionary(index, pa.string())
        found.append(
            (kind, lambda v, k=kind: pa.array(v, pa.string()).cast(k), st.sampled_from("abc"))
        )
    return found  # type: ignore[return-value]


SIMPLE = _simple()
#: pyarrow up to 25 writes null among lists of one length and cannot read it (apache/arrow#35692).
READS_NULLS_IN_FIXED = int(pa.__version__.split(".")[0]) >= 26


@st.composite
def arrays(draw: st.DrawFn, count: int, depth: int = 2) -> Any:
    shapes = ["simple"] * 4 + ["list", "large", "struct", "map"]
    shapes += ["fixed"] * (READS_NULLS_IN_FIXED or depth == 2)
    shape = draw(st.sampled_from(shapes))
    if depth == 0 or shape == "simple":
        _, make, values = draw(st.sampled_from(SIMPLE))
        return make(draw(st.lists(st.none() | values, min_size=count, max_size=count)))
    mask = pa.array(draw(st.lists(st.booleans(), min_size=count, max_size=count)), pa.bool_())
    if shape == "struct":
        inner = [draw(arrays(count, depth - 1)) for _ in range(draw(st.integers(1, 3)))]
        return pa.StructArray.from_arrays(inner, [f"f{i}" for i in range(len(inner))], mask=mask)
    if shape == "fixed":
        items = draw(arrays(2 * count, depth - 1))
        given = mask if READS_NULLS_IN_FIXED else None
        return pa.FixedSizeListArray.from_arrays(items, 2, mask=given)
    sizes = draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    ends = list(itertools.accumulate(sizes, initial=0))
    items = draw(arrays(ends[-1], depth - 1))
    if shape == "map":
        keys = pa.array([f"k{i}" for i in range(ends[-1])], pa.string())
        return pa.MapArray.from_arrays(pa.array(ends, pa.int32()), keys, items)
    if shape == "large":
        return pa.LargeListArray.from_arrays(pa.array(ends, pa.int64()), items, mask=mask)
    return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), items, mask=mask)


@st.composite
def tables(draw: st.DrawFn) -> pa.Table:
    count = draw(st.integers(1, 25))
    columns = draw(st.lists(arrays(count), min_size=1, max_size=4))
    fields = [pa.field(f"c{i}", column.type) for i, column in enumerate(columns)]
    metadata = draw(st.dictionaries(st.sampled_from(["who", "why"]), st.text("ab"), max_size=2))
    return pa.Table.from_arrays(columns, schema=pa.schema(fields, metadata or None))


@pytest.mark.thorough
@settings(max_examples=150)
@given(table=tables(), shuffled=st.booleans(), batch_size=st.sampled_from([0, 1, 4]))
def test_any_table_comes_out_as_it_was(table: pa.Table, shuffled: bool, batch_size: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        chosen = Selection(shuffle_seed=3 if shuffled else None)
        found = mapped(table, place, selection=chosen, batch_size=batch_size)
        expected = pq.read_table(place / "in.parquet")
        if not shuffled:
            check_same(found, expected)
        assert found.schema.equals(expected.schema, check_metadata=True)
        for column in expected.schema.names:
            one, two = raw(found[column].combine_chunks()), raw(expected[column].combine_chunks())
            assert sorted(map(repr, one)) == sorted(map(repr, two))


def every_type(count: int = 23) -> pa.Table:
    columns = {"n": pa.array(range(count))}
    for kind, make, values in SIMPLE:
        examples = _examples(values, count)
        columns[str(kind)] = make(examples)
    image = [{"bytes": bytes([n]), "path": None} if n % 4 else None for n in range(count)]
    columns["image"] = pa.array(image, pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
    columns["float list"] = pa.array([[0.5, float("nan")], None] * count, pa.list_(pa.float32()))[
        :count
    ]
    return pa.table(columns).replace_schema_metadata({"huggingface": '{"info": {"features": {}}}'})


def _examples(values: st.SearchStrategy[Any], count: int) -> list[Any]:
    found: list[Any] = []

    @settings(max_examples=1, derandomize=True, database=None)
    @given(st.lists(values, min_size=count, max_size=count))
    def take(items: list[Any]) -> None:
        found[:] = items

    take()
    found[1] = None
    return found


def test_every_type_comes_out_as_it_was(tmp_path: Path) -> None:
    table = every_type()
    check_same(mapped(table, tmp_path), pq.read_table(tmp_path / "in.parquet"))


@pytest.mark.parametrize("stage", ["same", "copied", "sometimes"])
def test_the_bytes_do_not_depend_on_who_did_which_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    monkeypatch.setattr(columnar, "GROUP_BYTES", 4000)
    pq.write_table(every_type(), tmp_path / "in.parquet", row_group_size=7)
    source = open_input(tmp_path / "in.parquet", Selection(), folder=tmp_path / "input")
    sink = SinkSpec(path=tmp_path / "out", format="parquet", inputs=tuple(source.files))
    files = []
    for number, (batch_size, rows_per_chunk) in enumerate([(4, 10), (3, 10), (23, 5), (1, 23)]):
        place = tmp_path / str(number)
        place.mkdir()
        how = {"keeps_types": True, "batch_size": batch_size, "rows_per_chunk": rows_per_chunk}
        parts = run_chunks(source, place, stage, **how).parts
        out = io.BytesIO()
        encoder_for(sink, parts).write(parts, out)
        files.append(out.getvalue())
    written = pq.ParquetFile(pa.BufferReader(files[0])).metadata
    assert written.num_row_groups > 1
    assert [file == files[0] for file in files] == [True] * len(files)


def test_ids_are_added_beside_columns_that_stay(tmp_path: Path) -> None:
    found = mapped(every_type(), tmp_path, keeps_ids=True)
    assert found.schema.names[0] == "id"
    expected = pq.read_table(tmp_path / "in.parquet")
    assert [found.schema.field(f.name) for f in expected.schema] == list(expected.schema)


def test_columns_stay_when_rows_are_dropped_and_doubled(tmp_path: Path) -> None:
    found = mapped(every_type(), tmp_path, "copied")
    expected = pq.read_table(tmp_path / "in.parquet")
    assert found.schema.equals(expected.schema)
    numbers = [n for n in range(23) if n % 3 for _ in range(2 if n % 3 == 1 else 1)]
    assert found["n"].to_pylist() == numbers
    for name in set(expected.schema.names) - {"binary"}:
        kept = expected[name].take(pa.array(numbers))
        assert raw(found[name].combine_chunks()) == raw(kept.combine_chunks()), name
    assert found["binary"].null_count >= 8


def test_a_column_that_changes_in_one_row_has_a_type_for_all(tmp_path: Path) -> None:
    count = 20
    table = pa.table(
        {
            "n": pa.array(range(count), pa.int16()),
            "int8": pa.array([1] * count, pa.int8()),
            "when": pa.array([0] * count, pa.timestamp("ns")),
            "pairs": pa.array([[("k", 1)]] * count, pa.map_(pa.string(), pa.int64())),
            "f32": pa.array([0.5] * count, pa.float32()),
        }
    )
    found = mapped(table, tmp_path, "changed_once")
    types = {field.name: field.type for field in found.schema}
    assert types["n"] == pa.int16()
    assert types["int8"] == pa.int64()
    assert types["f32"] == pa.float32(), "null is a value of every type"
    assert types["when"] == types["pairs"] == pa.string()
    assert found["when"].to_pylist()[6:8] == ['"1970-01-01T00:00:00"', '"then"']
    assert found["pairs"].to_pylist()[6:8] == ['[["k",1]]', '[["k",5]]']
    assert found["int8"].to_pylist()[6:8] == [1, 1000]


def test_what_a_stage_returns_has_the_type_of_what_it_returned(tmp_path: Path) -> None:
    table = pa.table(
        {
            "int8": pa.array([1, 2, 3], pa.int8()),
            "list": pa.array([[0.5]] * 3, pa.list_(pa.float32())),
            "int16": pa.array([1, None, 3], pa.int16()),
        }
    )
    found = mapped(table, tmp_path, "altered")
    assert {field.name: field.type for field in found.schema} == {
        "int8": pa.int64(),
        "list": pa.list_(pa.float64()),
        "int16": pa.int16(),
        "bytes": pa.binary(),
        "when": pa.timestamp("us", tz="UTC"),
        "clock": pa.timestamp("us"),
        "day": pa.date32(),
        "time": pa.time64("us"),
        "took": pa.duration("us"),
        "price": pa.decimal128(4, 2),
        "nested": pa.struct([("raw", pa.list_(pa.binary()))]),
    }
    assert found["list"].to_pylist() == [[0.5, 1.5]] * 3
    assert found["int8"].to_pylist() == [1000, 2000, 3000]
    assert found["price"].to_pylist() == [decimal.Decimal("12.50")] * 3
    assert found["took"].to_pylist() == [datetime.timedelta(days=-1, microseconds=5)] * 3
    assert found["when"][0].as_py() == datetime.datetime(
        2020, 1, 2, 3, 4, 5, 6, tzinfo=datetime.UTC
    )
    assert found["nested"].to_pylist() == [{"raw": [b"a", None]}] * 3


def test_what_text_cannot_hold_is_said_before(tmp_path: Path) -> None:
    pq.write_table(every_type(), tmp_path / "in.parquet")
    source = open_input(tmp_path / "in.parquet", Selection(), folder=tmp_path / "input")
    raw_columns, fine_columns = source.lost_as_text()
    assert "base64" in raw_columns
    assert raw_columns.endswith(": binary, large_binary, fixed_size_binary[3], image")
    assert "timestamp[ns, tz=UTC]" in fine_columns
    assert "timestamp[us" not in fine_columns


@pytest.mark.parametrize("ordered", [False, True])
def test_categories_are_written_the_same_in_whatever_batches_they_come(
    tmp_path: Path, ordered: bool
) -> None:
    """They are sorted, as pandas has them, and more than a small batch needs."""
    count, found = 1200, []
    names = [f"c{n:03d}" for n in range(120)]
    places = pa.array([n * 7 % 117 if n % 11 else None for n in range(count)], pa.int16())
    tags = pa.DictionaryArray.from_arrays(places, names, ordered=ordered)
    pq.write_table(
        pa.table({"n": range(count), "tag": tags}), tmp_path / "in.parquet", row_group_size=500
    )
    for name, size, rows in (("one", 7, 400), ("two", 500, 1200)):
        place = tmp_path / name
        source = open_input(tmp_path / "in.parquet", Selection(), folder=place / "input")
        how: dict[str, Any] = {"keeps_types": True, "keeps_ids": False, "batch_size": size}
        done = run_chunks(source, place, rows_per_chunk=rows, **how)
        found.append(done.merged(source, place / "out.parquet"))
    assert len({path.read_bytes() for path in found}) == 1
    column = pq.read_table(found[0])["tag"].combine_chunks()
    assert column.to_pylist() == tags.to_pylist()
    assert column.type == tags.type
    if ordered:  # their order is what they mean
        assert column.dictionary.to_pylist() == names
