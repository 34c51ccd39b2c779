"""A map has numbers over time, as a training has: records per second, and who rejected how many."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.tracked import in_tensorboard

import muster
from muster.api.trackers.feed import read_position
from muster.api.trackers.guard import track
from muster.api.trackers.sources import source_of
from muster.run.record import own_id


def even(record: dict[str, Any]) -> dict[str, Any]:
    if record["x"] % 2:
        raise ValueError("odd")
    return record


def small(record: dict[str, Any]) -> dict[str, Any]:
    if record["x"] >= 490:
        raise ValueError("large")
    if record["x"] == 22 and not Path("once").exists():
        Path("once").touch()
        os.kill(os.getpid(), signal.SIGINT)
    return record


def points(run: muster.Run) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = {}
    for row in run.metrics().to_pylist():
        found.setdefault(row["name"], []).append((row["step"], row["value"]))
    return found


@pytest.mark.thorough
def test_a_map_that_goes_on_has_one_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_text("".join(json.dumps({"x": x}) + "\n" for x in range(500)))

    def go() -> bool:
        done = muster.map(
            [even, small], "in.jsonl", "out.jsonl", run_dir="r", executor="inline", chunk_rows=10,
            batch_size=5,
        )  # fmt: skip
        return done.is_interrupted

    assert go()
    run = muster.Run("r")
    [*_, (step, _)] = points(run)["rejected"]
    assert 20 < step < 500, "how far it came"
    assert not go()
    found = points(run)
    assert found["rejected"][-1] == (500, 255.0)
    assert (found["rejected/even"][-1], found["rejected/small"][-1]) == ((500, 250.0), (500, 5.0))
    steps = [step for step, _ in found["rejected"]]
    assert steps == sorted(set(steps)), "none twice"
    assert {row["task"] for row in run.metrics(name="rejected").to_pylist()} == {None}
    said: list[str] = []
    assert track(run.folder, ["tensorboard"], said.append) == [], said
    curves = in_tensorboard(run.folder)[""]
    assert curves["rejected"][-1] == (500, 255.0) and "rejected/small" in curves
    mark = read_position(run.folder.tracker_position("tensorboard"), own_id(run.folder).text)[0]
    assert source_of(run.folder, "id").num_after(mark) == 0
