"""`muster metrics` and `run.metrics()`: the same columns for every kind of run."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

import muster
from muster.api.report.sweep import curves_to_show
from muster.api.trackers.metrics import RankLog, Series, series_of_ranks, summary_of, table_of
from muster.base.errors import UsageError
from muster.base.metric_log import mark_start
from muster.cli.main import main
from muster.farm import canonical
from muster.farm.metrics import Curve
from muster.run.folder import RunFolder

TARGET = """
import math

def f(lr: float, ctx):
    for step in range(4):
        ctx.log(step, loss=(lr - step) ** 2)
    ctx.log(3, accuracy=math.nan)

def silent(lr: float):
    return lr
"""


def sweep(tmp_path: Path, name: str = "f") -> muster.Run:
    (tmp_path / "target.py").write_text(TARGET)
    target = f"{tmp_path}/target.py:{name}"
    return muster.sweep(
        target, grid={"lr": [1.0, 2.0]}, run_dir=tmp_path / "run", executor="inline"
    )


def test_the_points_of_a_sweep_are_a_table(tmp_path: Path) -> None:
    run = sweep(tmp_path)
    table = run.metrics(name="loss")
    assert table.column_names == ["task", "attempt", "name", "step", "time", "value"]
    rows = table.to_pylist()
    assert [(row["step"], row["value"]) for row in rows if row["task"] == rows[-1]["task"]] == [
        (0, 4.0), (1, 1.0), (2, 0.0), (3, 1.0)
    ]  # fmt: skip
    assert {row["attempt"] for row in rows} == {1}
    assert rows[0]["time"] > 1e9
    assert run.metrics(task="1").num_rows == 5
    with pytest.raises(UsageError, match="No metric is called 'los'") as caught:
        run.metrics(name="los")
    assert "accuracy, loss" in str(caught.value)
    found = summary_of(next(iter(run.series("2"))))
    assert (found.label, found.num_points, found.last) == ("2 (lr=2.0)", 4, 1.0)
    assert (found.smallest, found.smallest_at, found.largest, found.largest_at) == (0.0, 2, 4.0, 0)


def test_the_command_shows_settings_and_writes_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(sweep(tmp_path).path)
    assert main(["metrics", run]) == 0
    shown = capsys.readouterr().out
    assert "2 (lr=2.0)" in shown and "loss" in shown and "0 (2)" in shown and "nan" in shown
    assert main(["metrics", run, "--json", "--name", "loss"]) == 0
    assert [one["last"] for one in json.loads(capsys.readouterr().out)] == [4.0, 1.0]
    for suffix in ("parquet", "csv", "jsonl"):
        assert main(["metrics", run, "--to", f"{tmp_path}/points.{suffix}"]) == 0
        assert "10 rows" in capsys.readouterr().out
    assert main(["metrics", run, "--json", "--to", f"{tmp_path}/points.csv"]) == 0
    assert json.loads(capsys.readouterr().out) == {"rows": 10, "made": [f"{tmp_path}/points.csv"]}
    assert pq.read_table(tmp_path / "points.parquet").num_rows == 10
    assert len((tmp_path / "points.csv").read_text().splitlines()) == 11
    lines = [canonical.decode(x) for x in (tmp_path / "points.jsonl").read_bytes().splitlines()]
    assert math.isnan(lines[4]["value"])


def test_a_run_that_has_logged_nothing_says_how(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = sweep(tmp_path, "silent")
    assert run.metrics().num_rows == 0
    assert main(["metrics", str(run.path)]) == 0
    assert "ctx.log(step, loss=…)" in capsys.readouterr().out


def test_trainings_and_programs_have_the_same_columns(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    lines = [
        {"kind": "train", "step": 1, "loss": 0.5, "seconds": 0.1},
        {"kind": "eval", "step": 1, "loss": 0.75, "note": "x"},
        {"step": 0, "_time": 5.0, "_process": "a", "loss": 3.0},
        {"step": 1, "_time": 6.0, "_process": "a", "loss": 2.0},
        {"step": 1, "_time": 7.0, "_process": "b", "loss": 1.0},
        {"step": 2, "_process": ["b"], "loss": 10**400},
        {"step": 10**30, "loss": 1.0},
        {"step": 3, "\udcff": 1.0},
    ]
    folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"torn')
    rows = table_of(series_of_ranks(folder)).to_pylist()
    found = [(r["attempt"], r["name"], r["step"], r["time"], r["value"]) for r in rows]
    assert (1, "train/loss", 1, None, 0.5) in found and (1, "eval/loss", 1, None, 0.75) in found
    own = [row for row in found if row[1] == "loss"]
    assert [row[2:] for row in own] == [(0, 5.0, 3.0), (1, 7.0, 1.0)]


def test_a_program_that_is_started_again_replaces_its_steps(tmp_path: Path) -> None:
    """Its first start was an older muster's, which named the process in each line."""
    path = tmp_path / "metrics.jsonl"
    log = RankLog(path)
    mark_start(path)
    assert log.curves() == {}
    starts = [
        [{"step": step, "_process": "1.5", "loss": 1.0} for step in range(5)],
        [{"step": step, "loss": 2.0} for step in (3, 4, 5)],
        [{"loss": 3.0}, {"loss": 3.5}],  # their steps are 0 and 1
        [{"step": step, "loss": 4.0} for step in (1, 2, 1)],  # folds
    ]
    ends = [(0, 1.0, 1), (3, 2.0, 2), (0, 3.0, 3), (1, 4.0, 4)]
    for lines, (step, value, attempt) in zip(starts, ends, strict=True):
        mark_start(path)
        with path.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
            file.write('{"torn')
        [curve] = log.curves().values()
        found = list(zip(curve.step.tolist(), curve.value.tolist(), curve.token, strict=True))
        assert (step, value, attempt) in found
        assert RankLog(path).curves()["loss"].step.tolist() == curve.step.tolist()
    assert [(step, value) for step, value, _ in found] == [(0, 3.0), (1, 4.0), (2, 4.0), (1, 4.0)]


def test_of_many_curves_the_lowest_and_the_highest_are_shown() -> None:
    one = np.ones(1)
    ends = [3.0, math.nan, 0.0, 9.0, 5.0, 4.0]
    every = [
        Series(str(n), f"{n} (x={n})", "loss", Curve(one, one, one * value, one))
        for n, value in enumerate(ends)
    ]
    chosen = curves_to_show(lambda: every, most=4)
    assert [series.task for series in chosen["loss"]] == ["0", "1", "2", "3"]
    assert len(curves_to_show(lambda: every, most=6)["loss"]) == 6


@pytest.mark.thorough
def test_the_report_of_a_sweep_has_its_curves(tmp_path: Path) -> None:
    run = sweep(tmp_path)
    assert main(["report", str(run.path)]) == 0
    assert (run.path / "figures" / "curves.png").stat().st_size > 5000
    assert "over steps, a line per task" in (run.path / "report" / "index.html").read_text()
