"""A column of a list that says how urgent its rows are: which begin first, and that it is no
parameter."""

from __future__ import annotations

import itertools
import subprocess
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster import Run, UsageError, sweep
from muster.farm.space import Space

Main = Callable[..., subprocess.CompletedProcess[str]]
URGENCY = st.integers(-(10**9), 10**9) | st.none()
SOURCE = """
import pathlib

def noted(x: int, y: int = 0, seed: int = 0):
    with (pathlib.Path(__file__).parent / "order").open("a") as file:
        print(x, file=file)
"""


@given(st.lists(URGENCY, min_size=1, max_size=9), st.integers(1, 3), st.integers(0, 3))
def test_every_task_has_the_priority_of_its_row(
    said: list[int | None], num_values: int, num_seeds: int
) -> None:
    rows = [{"x": x} | ({} if p is None else {"p": p}) for x, p in enumerate(said)]
    plain = [{"x": x} for x in range(len(said))]
    shape: dict[str, Any] = {"grid": {"y": range(num_values)}, "seeds": num_seeds or None}
    rows[0].setdefault("p", 0)
    space = Space.from_values(rows=rows, priority_column="p", **shape)
    found = list(zip(space, space.priorities(), strict=False))
    assert len(found) == len(space)
    assert [priority for _, priority in found] == [said[task["x"]] or 0 for task, _ in found]
    key = lambda task: sorted(task.items())  # noqa: E731
    others = Space.from_values(rows=plain, **shape)
    assert sorted((task for task, _ in found), key=key) == sorted(others, key=key), "the same tasks"
    for _, tasks in itertools.groupby(found, key=lambda one: one[0].get("seed")):
        order = [priority for _, priority in tasks]
        assert order == sorted(order, reverse=True)


REFUSED = {
    "no list": ({"grid": {"x": [1]}}, "without --list"),
    "no such column": ({"rows": [{"x": 1}]}, "no column p"),
    "no parameters": ({"rows": [{"p": 1}]}, "no parameters"),
    "which row": ({"rows": [{"x": 1, "p": 1}, {"x": 2, "p": 1.5}]}, "rows row 2: p = 1.5 is no"),
    "a text": ({"rows": [{"x": 1, "p": "soon"}]}, "p = soon is not a priority"),
    "a truth": ({"rows": [{"x": 1, "p": True}]}, "not a priority"),
    "too much": ({"rows": [{"x": 1, "p": 2**63}]}, "not a priority"),
    "the same task twice": ({"rows": [{"x": 1, "p": 1}, {"x": 1, "p": 2}]}, "twice|same|equal"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(what: str) -> None:
    values, said = REFUSED[what]
    with pytest.raises(UsageError, match=said):
        Space.from_values(priority_column="p", **values)  # type: ignore[arg-type]


def test_what_pandas_writes_is_read(tmp_path: Path) -> None:
    cells = {"x": [1, 2, 3, 4], "p": [3.0, float("nan"), -2.0, None]}
    rows = [dict(zip(cells, row, strict=True)) for row in zip(*cells.values(), strict=True)]
    assert Space.from_values(rows=rows, priority_column="p").listed.priorities == (3, 0, 0, -2)  # type: ignore[union-attr]
    (tmp_path / "l.csv").write_text("x,p\n1,3.0\n2,\n3,-2.0\n4,\n")
    read = Space.from_texts(list_file=tmp_path / "l.csv", priority_column="p")
    assert read.listed is not None and read.listed.priorities == (3, 0, 0, -2)
    with pytest.raises(UsageError, match="the cell of p is empty"):
        Space.from_texts(list_file=tmp_path / "l.csv")


def test_priorities_of_a_large_grid_take_no_memory() -> None:
    grid = {"y": range(3000), "z": range(3000)}
    space = Space.from_values(rows=[{"x": 1, "p": 4}], priority_column="p", grid=grid)
    tracemalloc.start()
    try:
        assert next(space.priorities()) == 4
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def _order(folder: Path) -> list[int]:
    return [int(line) for line in (folder / "order").read_text().split()]


@pytest.mark.thorough
def test_the_rows_begin_in_this_order(tmp_path: Path, muster_main: Main) -> None:
    (tmp_path / "t.py").write_text(SOURCE)
    (tmp_path / "l.csv").write_text("p,x\n0,1\n-1,2\n5,3\n2,4\n")
    flags = ("--on", "inline", "--quiet", "--monitor-interval", "0", "--run-dir", "r")
    words = ("sweep", *flags, "t.py:noted", "--list", "l.csv", "--priority-column", "p")
    assert muster_main(*words).returncode == 0
    assert _order(tmp_path) == [3, 4, 1, 2]
    assert Run(tmp_path / "r").results().column_names.count("p") == 0
    (tmp_path / "m.jsonl").write_text('{"x": 7}\n{"x": 8, "p": 1}\n')
    (tmp_path / "order").unlink()
    assert muster_main("add", "r", "--list", "m.jsonl").returncode == 0
    assert _order(tmp_path) == [8, 7]
    (tmp_path / "order").unlink()
    assert muster_main("add", "r", "--seeds", "2").returncode == 0
    assert _order(tmp_path)[:2] == [3, 3] and _order(tmp_path)[-2:] == [2, 2]
    assert muster_main(*words).returncode == 0, "the same command goes on"


def test_from_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.py").write_text(SOURCE)
    rows = [{"x": 1}, {"x": 2, "p": 3}]
    run = sweep("t.py:noted", rows=rows, priority_column="p", executor="inline", run_dir="r",
                monitor_interval_s=0)  # fmt: skip
    assert _order(tmp_path) == [2, 1]
    more = [{"x": 5, "p": -2}, {"x": 6}]
    assert run.add(rows=more, priority_column="p", priority=1) == 2


def test_a_list_that_is_added_says_which_column_it_has(tmp_path: Path, muster_main: Main) -> None:
    (tmp_path / "t.py").write_text(SOURCE)
    for name, text in (("0", "x\n1\n"), ("1", "x,y\n11,1\n"), ("2", "x,y\n21,2\n")):
        (tmp_path / f"a{name}.csv").write_text(text)
    flags = ("--on", "inline", "--quiet", "--monitor-interval", "0", "--run-dir", "r")
    assert muster_main("sweep", *flags, "t.py:noted", "--list", "a0.csv").returncode == 0
    add = ("add", "r", "--quiet", "--list")
    assert muster_main(*add, "a1.csv", "--priority-column", "y").returncode == 0
    refused = muster_main(*add, "a2.csv")
    assert refused.returncode == 2
    assert "write --priority-column y, or --priority-column ''" in refused.stderr
    assert muster_main(*add, "a2.csv", "--priority-column", "").returncode == 0
    assert sorted(_order(tmp_path)) == [1, 11, 21], "one task for one row"


def test_a_list_without_the_column_of_the_first(tmp_path: Path, muster_main: Main) -> None:
    (tmp_path / "t.py").write_text(SOURCE)
    (tmp_path / "a.csv").write_text("x,p\n1,2\n")
    (tmp_path / "b.csv").write_text("x\n2\n")
    flags = ("--on", "inline", "--quiet", "--monitor-interval", "0", "--run-dir", "r")
    words = ("sweep", *flags, "t.py:noted", "--list", "a.csv", "--priority-column", "p")
    assert muster_main(*words).returncode == 0
    refused = muster_main("add", "r", "--quiet", "--list", "b.csv")
    assert refused.returncode == 2 and "holds the priorities in the list" in refused.stderr
    (tmp_path / "c.csv").write_text("x,p\n3,\n4,1\n")
    assert muster_main("add", "r", "--quiet", "--list", "c.csv").returncode == 0
    again = ("add", "r", "--quiet", "--list", "b.csv", "--priority-column", "")
    assert muster_main(*again).returncode == 0
    assert _order(tmp_path) == [1, 4, 3, 2]
