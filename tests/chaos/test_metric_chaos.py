"""Kill -9 of anything while tasks log and save: no point is lost, and none is there twice."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from tests.chaos.test_chaos import Chaos

from muster.api.runs import Run

NUM_STEPS = 150
TARGET = f"""
import time

def work(x: int, ctx):
    first = (ctx.restore() or {{"step": 0}})["step"] if x % 3 else 0  # every third starts afresh
    for step in range(first, {NUM_STEPS}):
        ctx.log(step, loss=x + 1 / (step + 1))
        if step % 10 == 0:
            ctx.log(step, seldom=step * x)
        if step % 7 == 6:
            ctx.checkpoint({{"step": step + 1}})
        time.sleep(0.004)
    return {{"x": x}}
"""
RUN = """
import sys
import muster

if __name__ == "__main__":
    grid = {"x": range(int(sys.argv[1]))}
    run = muster.sweep("target.py:work", grid=grid, devices="cpu:2", run_dir="r", retries=500)
    sys.exit(run.exit_code)
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="kills are counted through /proc")


def play(folder: Path, seed: int, *, num_tasks: int, num_kills: int) -> None:
    chaos = Chaos(folder, seed, num_tasks=num_tasks, max_kills=num_kills)
    (folder / "target.py").write_text(TARGET)
    (folder / "run.py").write_text(RUN)
    for _ in range(100 + 2 * num_kills):
        code = chaos.run_once(patience_s=1.0)
        assert code in (None, 0), chaos.why()
        if code == 0:
            break
        deadline = time.monotonic() + 300
        while "worker.main" in chaos.processes().values() and time.monotonic() < deadline:
            time.sleep(0.05)
    run = Run(folder / "r")
    found = {
        (series.label, series.name): list(
            zip(series.curve.step.tolist(), series.curve.value.tolist(), strict=True)
        )
        for series in run.series()
    }
    num_attempts = run.metrics()["attempt"].to_numpy().max()
    print(f"{chaos.kills.total()} kills {dict(chaos.kills)}, up to attempt {num_attempts}")
    for x in range(num_tasks):
        label = f"{x + 1} (x={x})"
        loss = [(step, x + 1 / (step + 1)) for step in range(NUM_STEPS)]
        assert found.pop((label, "loss")) == loss, "the points of an undisturbed run"
        seldom = [(step, float(step * x)) for step in range(0, NUM_STEPS, 10)]
        assert found.pop((label, "seldom")) == seldom
    assert found == {}
    assert chaos.kills.total() >= num_kills, "too little was tested"


def test_a_few_kills_of_a_sweep_that_logs(tmp_path: Path) -> None:
    play(tmp_path, 3, num_tasks=10, num_kills=5)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_hundred_kills_of_a_sweep_that_logs(tmp_path: Path) -> None:
    play(tmp_path, 11, num_tasks=400, num_kills=200)
