"""Kill -9 of anything while tasks log and save: no point is lost, and none is there twice."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from tests.chaos.test_chaos import Chaos

from muster.api.runs import Run

NUM_STEPS = 150
TARGET = f"""
import os, time
from pathlib import Path

def work(x: int, ctx):
    first = (ctx.restore() or {{"step": 0}})["step"] if x % 3 else 0  # every third starts afresh
    for step in range(first, {NUM_STEPS}):
        ctx.log(step, loss=x + 1 / (step + 1))
        if step % 10 == 0:
            ctx.log(step, seldom=step * x)
        if step % 7 == 6:
            ctx.checkpoint({{"step": step + 1}})
        time.sleep(0.004)
    while x == int(os.environ["CHAOS_LAST"]) and not Path("enough").exists():
        time.sleep(0.01)
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
    chaos = Chaos(folder, seed, num_tasks=num_tasks, num_kills=num_kills, max_kills=num_kills)
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


#: It writes as programs of other languages do, and kills itself, at times within a line.
PROGRAM = f"""
import json, os, random, sys, time
from pathlib import Path

most_kills, state = int(sys.argv[1]), Path(sys.argv[2])
kills = state.with_name(state.name + ".kills")
num_kills = kills.stat().st_size if kills.exists() else 0
draw = random.Random(num_kills)
first = int(state.read_text()) if state.exists() and num_kills % 3 else 0  # some start afresh
dies_at = draw.randrange(first, {NUM_STEPS}) if num_kills < most_kills else -1
if num_kills < most_kills:
    kills.open("a").write("x")
with open(os.environ["MUSTER_METRICS"], "a", buffering=1) as file:
    for step in range(first, {NUM_STEPS}):
        line = json.dumps({{"step": step, "loss": 1 / (step + 1)}})
        if step == dies_at:
            file.write(line[: draw.randrange(len(line) + 2)])
            file.flush()
            os.kill(os.getpid(), 9)
        print(line, file=file)
        if step % 10 == 0:
            print(json.dumps({{"step": step, "seldom": step}}), file=file)
        if step % 7 == 6:
            state.with_suffix(".new").write_text(str(step + 1))
            state.with_suffix(".new").rename(state)
        time.sleep(0.004)
"""


def words_of(kind: str, kills: int) -> tuple[str, ...]:
    run = ("run", "--no-python", "--devices", "cpu:1", "--max-restarts", str(kills), "--quiet")
    program = (sys.executable, "program.py", str(kills))
    if kind == "run":
        return (*run, "--run-dir", "r", *program, "state")
    inner = (sys.executable, "-m", "muster", *run, "--run-dir", "{dir}/r", *program, "{state}")
    return ("sweep", "--grid", "state=state", "--devices", "cpu:1", "--run-dir", "r", "--", *inner)


def restart(folder: Path, kind: str, num_kills: int, num_starts: int) -> None:
    """Start a program that kills itself, and kill what has started it ``num_starts`` times."""
    (folder / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "muster", *words_of(kind, num_kills)]
    draw = random.Random(num_kills)
    for number in range(num_starts + 1):
        with (folder / "said.txt").open("ab") as said:
            process = subprocess.Popen(command, cwd=folder, stdout=said, stderr=said)
        if number < num_starts:
            with suppress(subprocess.TimeoutExpired):
                process.wait(draw.uniform(1.0, 5.0))
            process.kill()
        code = process.wait()
    assert code == 0, (folder / "said.txt").read_text()
    assert (folder / "state.kills").stat().st_size == num_kills, "too little was tested"
    [loss, seldom] = Run(folder / "r").series()
    found = list(zip(loss.curve.step.tolist(), loss.curve.value.tolist(), strict=True))
    assert found == [(step, 1 / (step + 1)) for step in range(NUM_STEPS)]
    assert seldom.curve.step.tolist() == list(range(0, NUM_STEPS, 10))


@pytest.mark.parametrize("kind", ["run", pytest.param("sweep", marks=pytest.mark.slow)])
def test_a_few_restarts_of_a_program_that_writes_lines(kind: str, tmp_path: Path) -> None:
    restart(tmp_path, kind, num_kills=4, num_starts=0)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["run", "sweep"])
def test_two_hundred_restarts_of_a_program_that_writes_lines(kind: str, tmp_path: Path) -> None:
    restart(tmp_path, kind, num_kills=200, num_starts=10)
