"""What logging costs: points per second through one coordinator, and the time of a task that logs.

python benchmarks/metrics.py            # about 3 minutes
python benchmarks/metrics.py --quick

The rate: two workers log four metrics a step as fast as they can; counted are the points in the
ledger, from the start of the first task until the sweep has ended. The cost: a task that computes
for some seconds in pieces of 10 ms logs one point after each piece, or none; alternating, medians.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import muster
from measuring import alternate, held, machine, summary, table, write_json

GOAL_POINTS_PER_S = 50_000
GOAL_PERCENT = 1.0
NUM_WORKERS = 2

TARGET = """
import time

def flood(seed: int, steps: int, ctx):
    for step in range(steps):
        ctx.log(step, loss=0.5, accuracy=0.25, lr=1e-3, norm=2.0)

def work(pieces: int, loops: int, logs: bool, ctx):
    began = time.perf_counter()
    for step in range(pieces):
        total = 0.0
        for i in range(loops):
            total += i * 0.5
        if logs:
            ctx.log(step, loss=total)
    return {"seconds": time.perf_counter() - began}
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


def seconds_of_a_task(pieces: int, loops: int, *, logs: bool) -> float:
    name = f"work-{time.monotonic_ns()}"
    run = muster.sweep(
        "target.py:work", grid={"pieces": [pieces], "loops": [loops], "logs": [logs]},
        run_dir=name, devices="cpu:1",
    )  # fmt: skip
    [row] = run.results().to_pylist()
    return float(row["metric_seconds"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    steps, pieces, repeats = (5_000, 30, 1) if arguments.quick else (200_000, 1000, 7)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        Path("target.py").write_text(TARGET)
        rates = [rate(steps) for _ in range(repeats)]
        loops = loops_of_10_ms()
        times = alternate(
            {
                "silent": lambda: seconds_of_a_task(pieces, loops, logs=False),
                "logs": lambda: seconds_of_a_task(pieces, loops, logs=True),
            },
            repeats,
        )
        os.chdir("/")
    silent, logs = (statistics.median(times[name]) for name in ("silent", "logs"))
    percent = 100 * (logs / silent - 1)
    points = statistics.median(rates)
    table(
        ["what", "median", "goal", ""],
        [
            ["points/s through one coordinator", f"{points:,.0f}", f"{GOAL_POINTS_PER_S:,}",
             held(points >= GOAL_POINTS_PER_S)],
            ["cost of 100 points/s", f"{percent:+.2f} %", f"< {GOAL_PERCENT} %",
             held(percent < GOAL_PERCENT)],
        ],
    )  # fmt: skip
    record = {
        "machine": machine(),
        "points_per_s": summary(rates),
        "seconds": {name: summary(values) for name, values in times.items()},
        "cost_percent": percent,
    }
    write_json(arguments.json, record)


if __name__ == "__main__":
    main()
