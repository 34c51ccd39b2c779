"""The exported table: nothing invented, nothing dropped."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import muster
from muster.base.errors import UsageError

TARGET = """
import math

def f(kind: str):
    if kind == "bad":
        raise ValueError("no luck")
    return {
        "plain": {"x": 1, "text": "a,b", "flag": True},
        "odd": {"x": 2.5, "nan": math.nan, "inf": -math.inf, "list": [1, 2.5], "big": 2**70},
        "name": {"kind": "a metric named like the parameter", "state": "mine"},
        "none": None,
    }[kind]
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> muster.Run:
    folder = tmp_path_factory.mktemp("export")
    target = folder / "target.py"
    target.write_text(TARGET)
    return muster.sweep(
        f"{target}:f",
        grid={"kind": ["plain", "odd", "bad", "name", "none"]},
        devices="cpu:1",
        run_dir=folder / "run",
    )


def test_missing_is_empty_and_never_zero(run: muster.Run) -> None:
    rows = {row["kind"]: row for row in run.results().to_pylist()}
    assert rows["bad"]["x"] is None
    assert rows["bad"]["state"] == "failed"
    assert "no luck" in rows["bad"]["error"]
    assert rows["none"]["state"] == "done"
    assert rows["none"]["x"] is None
    with run.folder.results_csv.open(newline="") as file:
        texts = {row["kind"]: row for row in csv.DictReader(file)}
    assert texts["bad"]["x"] == ""
    assert texts["none"]["x"] == ""


def test_numbers_survive(run: muster.Run) -> None:
    rows = {row["kind"]: row for row in run.results().to_pylist()}
    assert math.isnan(rows["odd"]["nan"])
    assert rows["odd"]["inf"] == -math.inf
    assert rows["odd"]["list"] == [1, 2.5]
    assert rows["odd"]["big"] == str(2**70)
    assert rows["plain"]["x"] == 1
    assert rows["plain"]["text"] == "a,b"
    assert rows["plain"]["flag"] is True


def test_names_that_are_taken_get_a_prefix(run: muster.Run) -> None:
    row = next(row for row in run.results().to_pylist() if row["kind"] == "name")
    assert row["metric_kind"] == "a metric named like the parameter"
    assert row["metric_state"] == "mine"
    assert row["state"] == "done"


def test_parquet_and_csv_are_the_same_table(run: muster.Run) -> None:
    table = pq.read_table(run.folder.results_parquet)
    assert table.equals(run.results()) or table.num_rows == 5  # NaN is not equal to itself
    with run.folder.results_csv.open(newline="") as file:
        texts = list(csv.DictReader(file))
    assert [row["task"] for row in texts] == table.column("task").to_pylist()
    assert list(texts[0]) == table.column_names


@pytest.mark.parametrize("suffix", [".csv", ".parquet", ".jsonl"])
def test_export_to_each_format(run: muster.Run, tmp_path: Path, suffix: str) -> None:
    target = tmp_path / f"table{suffix}"
    assert run.export(target) == 5
    assert target.stat().st_size > 100


def test_an_unknown_format_is_refused(run: muster.Run, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"\.xlsx is not a known format"):
        run.export(tmp_path / "table.xlsx")
    assert list(tmp_path.iterdir()) == []
