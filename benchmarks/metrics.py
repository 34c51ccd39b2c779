"""What logging costs: points per second through one coordinator, and the time of a task that logs.

python benchmarks/metrics.py            # about 3 minutes
python benchmarks/metrics.py --quick

The rate: two workers log four metrics a step as fast as they can; counted are the points in the
ledger, from the start of the first task until the sweep has ended. The cost: a task that computes
in pieces of 10 ms logs one point after each piece for half a second, or none, in turn: the median
of the ratios of neighbouring halves of a second, with its 95 % interval. Whole tasks beside each
other drift by several percent on most machines, which hides a cost below one.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent))
import muster
from measuring import held, interval, machine, summary, table, write_json

GOAL_POINTS_PER_S = 50_000
GOAL_PERCENT = 1.0
NUM_WORKERS = 2

TARGET = """
import json, time

def flood(seed: int, steps: int, ctx):
    for step in range(steps):
        ctx.log(step, loss=0.5, accuracy=0.25, lr=1e-3, norm=2.0)

def block(pieces: int, loops: int, first: int, logs: bool, ctx):
    began, cpu = time.perf_counter(), time.process_time()
    for step in range(first, first + pieces):
        total = 0.0
        for i in range(loops):
            total += i * 0.5
        if logs:
            ctx.log(step, loss=total)
    return time.perf_counter() - began, time.process_time() - cpu

def work(pairs: int, pieces: int, loops: int, ctx):
    costs = []
    for pair in range(pairs):
        order = (True, False) if pair % 2 else (False, True)
        both = {logs: block(pieces, loops, pair * pieces, logs, ctx) for logs in order}
        costs.append([both[True][k] / both[False][k] for k in (0, 1)])
    with open("costs.json", "w") as file:
        json.dump(costs, file)
"""


def rate(steps: int) -> float:
    """Points per second."""
    name = f"flood-{time.monotonic_ns()}"
    run = muster.sweep(
        "target.py:flood", grid={"steps": [steps]}, seeds=NUM_WORKERS, run_dir=name,
        devices=f"cpu:{NUM_WORKERS}",
    )  # fmt: skip
    ended = time.time()
    points = run.metrics()
    assert points.num_rows == NUM_WORKERS * steps * 4
    return points.num_rows / (ended - min(points["time"].to_pylist()))


def loops_of_10_ms() -> int:
    loops = 20_000
    began = time.perf_counter()
    total = 0.0
    for i in range(loops):
        total += i * 0.5
    return round(loops * 0.01 / (time.perf_counter() - began))


def costs_of_a_task(pairs: int, pieces: int, loops: int) -> list[tuple[float, float]]:
    """Each pair's ratios, with logging over without: of wall time and of processor time."""
    muster.sweep(
        "target.py:work", grid={"pairs": [pairs], "pieces": [pieces], "loops": [loops]},
        run_dir=f"work-{time.monotonic_ns()}", devices="cpu:1",
    )  # fmt: skip
    return [(wall, cpu) for wall, cpu in json.loads(Path("costs.json").read_text())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    steps, repeats = (5_000, 1) if arguments.quick else (200_000, 7)
    pairs, pieces = (4, 10) if arguments.quick else (150, 50)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        Path("target.py").write_text(TARGET)
        rates = [rate(steps) for _ in range(repeats)]
        costs = costs_of_a_task(pairs, pieces, loops_of_10_ms())
        os.chdir("/")
    of = {"wall time": [100 * (w - 1) for w, _ in costs], "cpu": [100 * (c - 1) for _, c in costs]}
    points = median(rates)
    table(
        ["what", "median", "goal", ""],
        [
            ["points/s through one coordinator", f"{points:,.0f}", f"{GOAL_POINTS_PER_S:,}",
             held(points >= GOAL_POINTS_PER_S)],
            *(
                [f"cost of 100 points/s, {what}",
                 "{:+.2f} % [{:+.2f}, {:+.2f}]".format(median(values), *interval(values)),
                 f"< {GOAL_PERCENT} %", held(median(values) < GOAL_PERCENT)]
                for what, values in of.items()
            ),
        ],
    )  # fmt: skip
    record = {
        "machine": machine(),
        "points_per_s": summary(rates),
        "cost_percent": {
            what: summary(values) | {"interval": interval(values)} for what, values in of.items()
        },
    }
    write_json(arguments.json, record)


if __name__ == "__main__":
    main()
