"""What logging costs: points per second through one coordinator, and the time of a task that logs.

python benchmarks/metrics.py            # about 5 minutes
python benchmarks/metrics.py --quick

The rate: two workers log four metrics a step as fast as they can; counted are the points in the
ledger, from the start of the first task until the sweep has ended. The cost: a task that computes
in pieces of 10 ms logs one point after each piece for half a second, or none, in turn: the median
of the ratios of neighbouring halves of a second, with its 95 % interval. Whole tasks beside each
other drift by several percent on most machines, which hides a cost below one. Beside it stands what
the calls themselves took, the share of each half second: nothing drifts there, but what they cost
the work between them is not in it. A cost whose interval has the goal in it is not judged.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from contextlib import chdir
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent))
import muster
from measuring import at_most, goal, interval, machine, summary, table, write_json

GOAL_POINTS_PER_S = 50_000
GOAL_PERCENT = 1.0
NUM_WORKERS = 2

TARGET = """
import json, time

def flood(seed: int, steps: int, ctx):
    for step in range(steps):
        ctx.log(step, loss=0.5, accuracy=0.25, lr=1e-3, norm=2.0)

def block(pieces: int, loops: int, first: int, logs: bool, ctx):
    began, cpu, inside = time.perf_counter(), time.process_time(), 0.0
    for step in range(first, first + pieces):
        total = 0.0
        for i in range(loops):
            total += i * 0.5
        if logs:
            called = time.perf_counter()
            ctx.log(step, loss=total)
            inside += time.perf_counter() - called
    wall = time.perf_counter() - began
    return wall, time.process_time() - cpu, inside / wall

def work(pairs: int, pieces: int, loops: int, ctx):
    costs = []
    for pair in range(pairs):
        order = (True, False) if pair % 2 else (False, True)
        both = {logs: block(pieces, loops, pair * pieces, logs, ctx) for logs in order}
        ratios = [both[True][k] / both[False][k] - 1 for k in (0, 1)]
        costs.append([100 * cost for cost in (*ratios, both[True][2])])
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
    """By the fastest of many: what is counted while the processor wakes up makes short pieces, and
    so more than 100 points a second."""
    loops, spans = 20_000, []
    for _ in range(200):
        began = time.perf_counter()
        total = 0.0
        for i in range(loops):
            total += i * 0.5
        spans.append(time.perf_counter() - began)
    return round(loops * 0.01 / min(spans))


def costs_of_a_task(pairs: int, pieces: int, loops: int) -> list[list[float]]:
    """Of each pair, in percent: what logging adds to wall time and to processor time, and what the
    calls themselves take.
    """
    muster.sweep(
        "target.py:work", grid={"pairs": [pairs], "pieces": [pieces], "loops": [loops]},
        run_dir=f"work-{time.monotonic_ns()}", devices="cpu:1",
    )  # fmt: skip
    found: list[list[float]] = json.loads(Path("costs.json").read_text())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--pairs", type=int, default=250, help="of half seconds")
    parser.add_argument("--repeats", type=int, default=7, help="of the rate")
    arguments = parser.parse_args()
    steps, repeats = (5_000, 1) if arguments.quick else (200_000, arguments.repeats)
    pairs, pieces = (4, 10) if arguments.quick else (arguments.pairs, 50)
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        Path("target.py").write_text(TARGET)
        rates = [rate(steps) for _ in range(repeats)]
        costs = costs_of_a_task(pairs, pieces, loops_of_10_ms())
    names = ("wall time", "cpu", "inside the calls")
    of = dict(zip(names, zip(*costs, strict=True), strict=True))
    points = median(rates)
    table(
        ["what", "median", "goal", ""],
        [
            ["points/s through one coordinator", f"{points:,.0f}", f"{GOAL_POINTS_PER_S:,}",
             goal("points/s through one coordinator", f"≥ {GOAL_POINTS_PER_S:,}",
                  f"{points:,.0f}", points >= GOAL_POINTS_PER_S, shown=False)],
            *(
                [f"cost of 100 points/s, {what}",
                 "{:+.2f} % [{:+.2f}, {:+.2f}]".format(median(values), *interval(values)),
                 f"< {GOAL_PERCENT} %",
                 goal(f"cost of 100 points/s, {what}, %", f"< {GOAL_PERCENT}",
                      "{:+.2f} [{:+.2f}, {:+.2f}]".format(median(values), *interval(values)),
                      at_most(values, GOAL_PERCENT), shown=False)]
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
