"""Whatever the file, the cuts and the pieces: the rows are those of a naive reader."""

from __future__ import annotations

import csv
import io
import itertools
import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from tests.examples import examples

from muster.pipeline.sources.source import BLANK, BadRow, Selection
from muster.pipeline.sources.table import open_input, reopen

Factory = pytest.TempPathFactory
relaxed = examples(60, suppress_health_check=[HealthCheck.too_slow])
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
values = st.one_of(
    st.none(), st.booleans(), st.integers(-(10**25), 10**25), st.floats(), texts,
    st.lists(st.integers(0, 9), max_size=3), st.dictionaries(texts, st.none(), max_size=2),
)  # fmt: skip
records = st.dictionaries(texts, values, max_size=4)
sizes = st.one_of(st.none(), st.integers(1, 9))


def rows_of(what: Any, selection: Selection, rows: int | None, rng: random.Random, folder: Path):
    """All rows of all shards in random pieces, by a source that was opened again."""
    source = open_input(what, selection, folder=folder)
    shards = list(source.shards(rows))
    assert shards == list(open_input(what, selection, folder=folder).shards(rows))
    again = reopen(json.loads(json.dumps(source.describe())))
    assert shards == list(again.shards(rows))
    assert [shard.order for shard in shards] == list(range(len(shards)))
    assert all(shard.count <= (rows or 10_000) for shard in shards)
    found: list[Any] = []
    for shard in shards:
        edges = sorted({0, shard.count, *(rng.randrange(shard.count) for _ in range(2))})
        for start, stop in itertools.pairwise(edges):
            piece = list(again.read(shard, start, stop))
            assert [number for number, _ in piece] == list(range(start, stop))
            found += [(shard.first + number, row) for number, row in piece]
    return found


def check(what: Any, expected: list[Any], rows: int | None, rng: random.Random, folder: Path):
    """Whole, in part and shuffled. ``repr`` because NaN is not itself."""
    found = rows_of(what, Selection(), rows, rng, folder)
    assert repr(found) == repr(list(enumerate(expected)))
    skip, limit = rng.randrange(len(expected) + 1), rng.randrange(len(expected) + 1)
    some = rows_of(what, Selection(skip=skip, limit=limit), rows, rng, folder)
    assert repr(some) == repr(found[skip : skip + limit])
    mixed = rows_of(what, Selection(shuffle_seed=5), rows, rng, folder)
    assert sorted(first for first, _ in mixed) == list(range(len(expected)))
    assert sorted(repr(row) for _, row in mixed) == sorted(repr(row) for row in expected)
    part = rows_of(what, Selection(shuffle_seed=5, skip=skip, limit=limit), rows, rng, folder)
    assert repr(part) == repr(mixed[skip : skip + limit])


@relaxed
@given(
    st.lists(st.one_of(records, st.sampled_from(["", "  "])), min_size=1, max_size=30),
    sizes, st.sampled_from(["\n", "\r\n"]), st.booleans(), st.booleans(), st.booleans(),
    st.randoms(use_true_random=False),
)  # fmt: skip
def test_json_lines(tmp_path_factory, items, rows, newline, ends, has_bom, is_ascii, rng) -> None:
    folder = tmp_path_factory.mktemp("source")
    lines = [
        item if isinstance(item, str) else json.dumps(item, ensure_ascii=is_ascii) for item in items
    ]
    text = newline.join(lines) + (newline if ends or not lines[-1] else "")
    path = folder / "data.jsonl"
    path.write_bytes((b"\xef\xbb\xbf" if has_bom else b"") + text.encode())
    expected = [json.loads(line) if line.strip() else BLANK for line in lines]
    check(str(path), expected, rows, rng, folder / "input")


@relaxed
@given(
    st.lists(st.lists(texts, min_size=2, max_size=2), min_size=1, max_size=30),
    sizes, st.sampled_from(["\n", "\r\n"]), st.sampled_from([csv.QUOTE_ALL, csv.QUOTE_MINIMAL]),
    st.booleans(), st.sampled_from(["csv", "tsv"]), st.randoms(use_true_random=False),
)  # fmt: skip
def test_csv(tmp_path_factory, items, rows, newline, quoting, has_bom, kind, rng) -> None:
    folder = tmp_path_factory.mktemp("source")
    # A bare carriage return must be quoted, which the writer does not do by itself.
    quoting = csv.QUOTE_ALL if any("\r" in text for row in items for text in row) else quoting
    text = io.StringIO()
    comma = "," if kind == "csv" else "\t"
    writer = csv.writer(text, lineterminator=newline, quoting=quoting, delimiter=comma)
    writer.writerows([["a,\n", "b"], *items])
    path = folder / f"data.{kind}"
    path.write_bytes((b"\xef\xbb\xbf" if has_bom else b"") + text.getvalue().encode())
    expected = list(csv.DictReader(io.StringIO(text.getvalue(), newline=""), delimiter=comma))
    assert len(expected) == len(items)
    check(str(path), expected, rows, rng, folder / "input")


@relaxed
@given(
    st.lists(st.tuples(st.integers(0, 99), texts), min_size=1, max_size=40),
    st.integers(1, 12), sizes, st.randoms(use_true_random=False),
)  # fmt: skip
def test_parquet(tmp_path_factory, items, group, rows, rng) -> None:
    folder = tmp_path_factory.mktemp("source")
    table = pa.table({"n": [n for n, _ in items], "text": [text for _, text in items]})
    pq.write_table(table, folder / "data.parquet", row_group_size=group)
    check(str(folder / "data.parquet"), table.to_pylist(), rows, rng, folder / "input")


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_several_files_are_one_input_in_natural_order(tmp_path: Path, kind: str) -> None:
    expected = []
    (tmp_path / "data" / "deep").mkdir(parents=True)
    (tmp_path / "data" / ".hidden.jsonl").write_text("no\n")
    (tmp_path / "data" / "README.md").write_text("no\n")
    for number in (1, 2, 10, 11):
        some = [{"n": f"{number}-{row}"} for row in range(number)]
        expected += some
        path = tmp_path / "data" / ("deep" if number == 1 else "") / f"part-{number}.{kind}"
        if kind == "parquet":
            pq.write_table(pa.Table.from_pylist(some), path)
        elif kind == "csv":
            path.write_text("n\n" + "".join(f"{row['n']}\n" for row in some))
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in some))
    for what in (str(tmp_path / "data"), str(tmp_path / "data" / "**" / f"*.{kind}")):
        found = rows_of(what, Selection(), 3, random.Random(1), tmp_path / "input")
        assert found == list(enumerate(expected))


def test_a_shard_holds_at_most_32_mib_and_a_larger_line_is_one(tmp_path: Path) -> None:
    widths = [20, 20, 40, 1, 31, 2]
    path = tmp_path / "wide.jsonl"
    with path.open("w") as file:
        for width in widths:
            file.write(json.dumps({"t": "x" * ((width << 20) - 20)}) + "\n")
    source = open_input(path, Selection(), folder=tmp_path / "input")
    assert [shard.count for shard in source.shards(100)] == [1, 1, 1, 2, 1]
    found = [len(row["t"]) for shard in source.shards(100) for _, row in source.read(shard, 0, 9)]
    assert found == [(width << 20) - 20 for width in widths]


@pytest.mark.parametrize(
    ("num_rows", "sizes_expected"),
    [(3, {3}), (511, {511}), (512, {256}), (20_000, {281, 313}), (700_000, {10_000})],
)
def test_the_default_is_a_64th_from_256_rows_to_10_000(tmp_path, num_rows, sizes_expected) -> None:
    (tmp_path / "d.jsonl").write_bytes(b"{}\n" * num_rows)
    source = open_input(tmp_path / "d.jsonl", Selection(), folder=tmp_path / "input")
    shards = list(source.shards(None))
    assert {shard.count for shard in shards} == sizes_expected
    assert sum(shard.count for shard in shards) == num_rows


BAD_LINES = [
    (b'{"a": 1', "not JSON: "),
    (b"[1]", "not a JSON object but a list"),
    (b"3", "not a JSON object but a number"),
    (b"null", "not a JSON object but null"),
    (b"true", "not a JSON object but true or false"),
    (b'{"a": "\xff"}', "not UTF-8: byte 8 of the line is 0xff"),
    (b'{"a": "\\ud800"}', "not Unicode: half of a surrogate pair stands alone"),
    (b"[" * 200_000, "not JSON that can be read: nested too deeply"),
]


@pytest.mark.parametrize(("line", "reason"), BAD_LINES)
def test_a_bad_line_is_named_and_stops_nothing(tmp_path: Path, line: bytes, reason: str) -> None:
    good = b'{"n": 1}\n'
    (tmp_path / "data.jsonl").write_bytes(good * 16 + line + b"\n\n" + good * 3)
    for rows in (1, 4, 100):
        found = rows_of(
            tmp_path / "data.jsonl", Selection(), rows, random.Random(2), tmp_path / "input"
        )
        bad = found[16][1]
        assert isinstance(bad, BadRow)
        assert bad.where == "data.jsonl, line 17"
        assert bad.reason.startswith(reason)
        assert [row for _, row in found[17:]] == [BLANK, {"n": 1}, {"n": 1}, {"n": 1}]


def test_csv_rows_that_are_none_are_named(tmp_path: Path) -> None:
    text = b'a,b\n1,2\n"x\ny",2,3\n4\n\n5,\xe9\n6,"7\n'
    (tmp_path / "data.csv").write_bytes(text)
    for rows in (1, 2, None):
        found = rows_of(
            tmp_path / "data.csv", Selection(), rows, random.Random(3), tmp_path / "input"
        )
        assert [row for _, row in found] == [
            {"a": "1", "b": "2"},
            BadRow("data.csv, line 3", "3 fields where the header has 2"),
            BadRow("data.csv, line 5", "1 fields where the header has 2"),
            BLANK,
            BadRow(
                "data.csv, line 7",
                "not UTF-8: byte 3 of the line is 0xe9 (name another with --encoding)",
            ),
            BadRow("data.csv, line 8", "not CSV: unexpected end of data"),
        ]


def test_long_csv_fields_are_read(tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_text("a\n" + "x" * 1_000_000 + "\n")
    found = rows_of(tmp_path / "data.csv", Selection(), None, random.Random(4), tmp_path / "i")
    assert found == [(0, {"a": "x" * 1_000_000})]


def test_a_quote_that_is_never_closed_is_named_and_swallows_no_rows_silently(tmp_path) -> None:
    (tmp_path / "d.csv").write_text('a,b\n0,x\n1,"abc\n2,def\n3,ghi\n')
    source = open_input(tmp_path / "d.csv", Selection(), folder=tmp_path / "input")
    found = [row for shard in source.shards(None) for _, row in source.read(shard, 0, 99)]
    assert found[0] == {"a": "0", "b": "x"}
    assert isinstance(found[1], BadRow)
    assert "line 3" in found[1].where
