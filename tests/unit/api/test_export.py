"""The exported table: nothing invented, nothing dropped."""

from __future__ import annotations

import csv
import math
import pickle
import subprocess
import sys
from collections.abc import Callable
from functools import reduce
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.hostile_texts import unescape_surrogates

import muster
from muster.api.trackers.metrics import write_points
from muster.base.errors import UsageError
from muster.farm.canonical import decode, escape_surrogates
from muster.farm.table import widen, widen_by_all

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


def test_a_task_is_named_by_its_number_and_devices_by_a_text(run: muster.Run) -> None:
    assert run.log(3) == run.log("3") and "no luck" in str(run.trace(3))
    for devices in (2, ["cpu:1"]):
        with pytest.raises(UsageError, match="is not a text"):
            muster.sweep(
                f"{run.path.parent}/target.py:f", grid={"kind": ["none"]}, devices=devices,
                run_dir=run.path / "a",
            )  # fmt: skip


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


_VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=2),
    st.lists(st.one_of(st.integers(0, 3), st.floats(), st.none()), max_size=2),
    st.just({}),
)  # fmt: skip


@given(st.lists(_VALUES, max_size=6), st.lists(_VALUES, max_size=6))
def test_the_type_of_a_column_does_not_depend_on_how_its_rows_are_read(
    before: list[object], values: list[object]
) -> None:
    kind = reduce(widen, before, None)
    assert widen_by_all(kind, values) == reduce(widen, values, kind)


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
    with pytest.raises(UsageError, match=r"`muster export` also writes a search to \.db"):
        write_points([], tmp_path / "points.db")  # the points of a run are no study
    assert list(tmp_path.iterdir()) == []


COMMAND = """
import json, os, sys
json.dump({"loss": float(sys.argv[1])}, open(os.path.join(sys.argv[2], "result.json"), "w"))
"""

ODD = """
import pathlib
import muster

def f(kind: str, ctx: muster.Context):
    return {
        "float": 1.5,
        "pair": (1, {"acc": 0.5}),
        "nested": {"a": {"b": 1}, "rows": [{"x": 1}]},
        "set": {"ok": 2, "these": {1, 2}},
        "twice": {1: 1, "1": 2},
        "surrogate": {"file": "a\\udcff", "\\udcfe": 1, "paths": ["\\udcfd"], "like": r"\\udcff"},
        "formula": {"=key": 1, "text": "=1+1", "minus": "-1", "at": "@x", "": 2, "nul": "a\\0b"},
    }[kind]
"""


def test_whatever_is_returned_is_kept(tmp_path: Path) -> None:
    target = tmp_path / "odd.py"
    target.write_text(ODD)
    kinds = ["float", "pair", "nested", "set", "twice", "surrogate", "formula"]
    run = muster.sweep(
        f"{target}:f",
        grid={"kind": kinds},
        devices="cpu:1",
        run_dir=tmp_path / "run",
        keep_going=True,
        monitor_interval_s=0,
    )
    rows = {row["kind"]: row for row in run.results().to_pylist()}
    assert rows["float"]["value"] == 1.5
    assert (rows["pair"]["value_0"], rows["pair"]["value_1.acc"]) == (1, 0.5)
    assert (rows["nested"]["a.b"], rows["nested"]["rows"]) == (1, ['{"x":1}'])
    assert rows["set"]["ok"] == 2
    kept = run.path / rows["set"]["folder"] / rows["set"]["these"]
    assert pickle.loads(kept.read_bytes()) == {1, 2}
    assert rows["twice"]["state"] == "failed"
    assert "both named" in rows["twice"]["error"]
    [whole] = run.path.glob("attempts/*/result.pickle")
    assert pickle.loads(whole.read_bytes()) == {1: 1, "1": 2}
    odd = rows["surrogate"]
    assert unescape_surrogates(odd["file"]) == "a\udcff"
    assert unescape_surrogates(odd["paths"][0]) == "\udcfd"
    assert unescape_surrogates(odd["like"]) == r"\udcff"
    assert odd[escape_surrogates("\udcfe")] == 1
    with run.folder.results_csv.open(newline="") as file:
        cells = {row["kind"]: row for row in csv.DictReader(file)}["formula"]
    assert cells["'=key"] == "1"
    assert (cells["text"], cells["minus"], cells["at"]) == ("'=1+1", "-1", "'@x")
    assert pq.read_table(run.folder.results_parquet)["text"].to_pylist()[-1] == "=1+1"
    run.export(tmp_path / "table.jsonl")
    lines = [decode(line) for line in (tmp_path / "table.jsonl").read_bytes().splitlines()]
    assert lines[5]["file"] == "a\udcff"
    assert lines[6]["nul"] == "a\0b"


def test_values_of_commands_are_numbers_where_all_of_them_are(tmp_path: Path) -> None:
    program = tmp_path / "c.py"
    program.write_text(COMMAND)
    run = muster.sweep(
        [sys.executable, str(program), "{lr}", "{dir}", "{tag}", "{model.width}", "--token=abc"],
        rows=[
            {"lr": "1e-3", "tag": "007", "model.width": "64"},
            {"lr": "2", "tag": "8", "model.width": "128"},
        ],
        devices="cpu:1",
        run_dir=tmp_path / "run",
        monitor_interval_s=0,
    )
    rows = run.results().to_pylist()
    assert rows[0]["target"].endswith(" --token=…")
    assert [row["lr"] for row in rows] == [0.001, 2.0]
    assert [row["loss"] for row in rows] == [0.001, 2.0]
    assert [row["tag"] for row in rows] == ["007", "8"]
    assert [row["model.width"] for row in rows] == [64, 128]


CLASSES = """
from __future__ import annotations
from dataclasses import dataclass, field

@dataclass
class Inner:
    lr: float

@dataclass
class Config:
    inner: Inner
    width: int = 8
    more: list[Inner] = field(default_factory=list)

def f(config: Config, other: Config | None = None):
    assert isinstance(config, Config) and isinstance(config.inner, Inner), config
    assert all(isinstance(item, Inner) for item in config.more)
    return {"lr": config.inner.lr, "width": config.width, "more": len(config.more)}
"""


def test_parameters_may_be_dataclasses(
    tmp_path: Path, muster_main: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    (tmp_path / "t.py").write_text(CLASSES)
    dry = ("sweep", "t.py:f", "--devices", "cpu:1", "--dry-run", "--grid")
    wrong = muster_main(*dry, 'config=[{"inner": {"rate": 1}}]')
    assert wrong.returncode == 2
    assert "Inner has no field 'rate', but lr" in wrong.stderr
    right = muster_main(*dry, 'config=[{"inner": {"lr": 1}}]')
    assert right.returncode == 0, right.stderr
    run = muster.sweep(
        f"{tmp_path / 't.py'}:f",
        grid={"config": [{"inner": {"lr": 0.1}, "more": [{"lr": 1}]}, {"inner": {"lr": 1}}]},
        devices="cpu:1",
        run_dir=tmp_path / "run",
        monitor_interval_s=0,
    )
    rows = run.results().to_pylist()
    assert [(row["lr"], row["width"], row["more"]) for row in rows] == [(0.1, 8, 1), (1.0, 8, 0)]
    assert [row["config.inner.lr"] for row in rows] == [0.1, 1.0]
