"""``where`` against a naive filter, for each kind of file."""

from __future__ import annotations

import csv
import json
import operator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples

from muster.base.errors import UnknownNameError, UsageError
from muster.pipeline.sources.conditions import parse_conditions
from muster.pipeline.sources.source import Selection
from muster.pipeline.sources.table import open_input

COMPARE = {
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le,
    ">": operator.gt, ">=": operator.ge,
}  # fmt: skip


def read_all(what: Any, selection: Selection, folder: Path, rows: int | None = 4) -> list[Any]:
    source = open_input(what, selection, folder=folder)
    return [row for shard in source.shards(rows) for _, row in source.read(shard, 0, shard.count)]


@examples(60)
@given(
    st.lists(
        st.tuples(st.one_of(st.none(), st.integers(-5, 5)), st.one_of(st.none(), st.text("abc"))),
        min_size=1, max_size=30,
    ),
    st.sampled_from(sorted(COMPARE)), st.integers(-6, 6), st.text("abc", min_size=1, max_size=2),
    st.sampled_from(["jsonl", "parquet"]), st.booleans(), st.integers(1, 6),
    st.one_of(st.none(), st.just(3)),
)  # fmt: skip
def test_where_is_a_naive_filter(
    tmp_path_factory, items, op, number, text, kind, by_text, group, seed
) -> None:
    folder = tmp_path_factory.mktemp("where")
    rows = [{"n": n, "t": t} for n, t in items]
    path = folder / f"data.{kind}"
    if kind == "parquet":
        schema = pa.schema([("n", pa.int64()), ("t", pa.string())])
        pq.write_table(pa.Table.from_pylist(rows, schema), path, row_group_size=group)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    name, value = ("t", text) if by_text else ("n", number)

    def holds(row: Any) -> bool:
        if row[name] is None:
            return op == "!="
        return bool(COMPARE[op](row[name], value))

    where = (f"{name} {op} {json.dumps(value)}",)
    plain = read_all(path, Selection(shuffle_seed=seed), folder / "input")
    found = read_all(path, Selection(where=where, shuffle_seed=seed), folder / "input")
    assert found == [row if holds(row) else None for row in plain]
    part = Selection(where=where, shuffle_seed=seed, skip=2, limit=5)
    assert read_all(path, part, folder / "input") == found[2:7]


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("level>=3", [2, 3]),
        ("level == 10", [3]),
        ("level in 2, 10", [1, 3]),
        ("source == olympiads", [0, 3]),
        ('source == "olympiads"', [0, 3]),
        ("source in 'a, b', cn", [1, 2]),
        ("source != cn", [0, 1, 3]),
        ("source<b", [1, 2][:1]),
        ("missing  ==  1", []),
    ],
)
def test_the_same_words_for_csv_and_json(tmp_path: Path, text: str, kept: list[int]) -> None:
    rows = [(1, "olympiads"), (2, "a, b"), (3, "cn"), (10, "olympiads")]
    with (tmp_path / "d.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("level", "source", "missing"), *((*row, "") for row in rows)])
    lines = (json.dumps({"level": n, "source": s, "missing": None}) + "\n" for n, s in rows)
    (tmp_path / "d.jsonl").write_text("".join(lines))
    for name in ("d.csv", "d.jsonl"):
        found = read_all(tmp_path / name, Selection(where=(text,)), tmp_path / "input")
        assert [n for n, row in enumerate(found) if row is not None] == kept


def test_values_of_other_types_match_nothing_but_unequal() -> None:
    [at_least, unequal, is_true] = parse_conditions(["x>=3", "x!=3", "x==true"], ["x"])
    for value in (None, "text", [3], {"a": 3}, True):
        assert not at_least.holds({"x": value}) or value == "text"
        assert unequal.holds({"x": value})
    assert is_true.holds({"x": True})
    assert not is_true.holds({"x": False})
    assert not at_least.holds({})
    assert unequal.holds({})


@pytest.mark.parametrize(
    "text", ["level", "level >=", "level =< 3 ==", "in a", "x in a,,b", "x =="]
)
def test_a_condition_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"condition|column"):
        parse_conditions([text], ["level", "x"])


def test_an_unknown_column_lists_what_exists(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text('{"level": 1}\n{"source": "a"}\n')
    with pytest.raises(UnknownNameError) as caught:
        read_all(tmp_path / "d.jsonl", Selection(where=("levels>3",)), tmp_path / "input")
    assert "Unknown column 'levels'" in str(caught.value)
    assert "did you mean 'level'? Known: level, source." in str(caught.value)


def test_row_groups_that_cannot_match_are_not_decoded(tmp_path: Path) -> None:
    path = tmp_path / "d.parquet"
    table = pa.table({"n": list(range(200)), "text": ["x" * 50] * 200})
    pq.write_table(table, path, row_group_size=100, compression="none", use_dictionary=False)
    # Spoil the second group's data; only its statistics, in the footer, still say what it holds.
    start = pq.read_metadata(path).row_group(1).column(0).data_page_offset
    data = bytearray(path.read_bytes())
    data[start : start + 60] = b"\xff" * 60
    path.write_bytes(data)
    found = read_all(path, Selection(where=("n < 50",)), tmp_path / "input", rows=100)
    assert [row["n"] for row in found if row] == list(range(50))
    with pytest.raises(OSError):
        read_all(path, Selection(where=("n < 150",)), tmp_path / "input", rows=100)
