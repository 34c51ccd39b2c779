"""What logging costs: points per second through one coordinator, and the time of a task that logs.

python benchmarks/metrics.py            # about 3 minutes
python benchmarks/metrics.py --quick

The rate: two workers log four metrics a step as fast as they can; counted are the points in the
ledger, from the start of the first task until the sweep has ended. The cost: a task that computes
in pieces of 10 ms logs one point in each. A machine's speed drifts by several percent within
seconds, so what is compared lies as close together as it can: a piece has two halves, and a coin
says which one begins with the point. The difference of the halves is what the call costs, with all
that it does to the work behind it. What comes later, or elsewhere, is added as processor time: that
of the worker's other threads, which send twice a second and whose time is taken for lost to the
work, and under "processor time" that of the coordinator; of both what is beyond that in stretches
without points, which alternate with the others. Both act by the clock, so theirs are shares of the
wall time, all of which the work has on a machine that does nothing else. Each figure is one of a
pair of stretches of 3 s: the median with its 95 % interval. "Without points" is the difference of
the halves where nothing is logged: what is only scatter.

Until 28 November 2026 half seconds with points were compared with half seconds without: on a
machine that drifts the interval was six percent wide, and the coordinator's time was not in it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from contextlib import chdir
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))
import muster
from measuring import at_most, goal, interval, machine, summary, table, told, write_json

GOAL_POINTS_PER_S = 50_000
GOAL_PERCENT = 1.0
NUM_WORKERS = 2

TARGET = """
import json, random, time

BLOCKS = 6

def flood(seed: int, steps: int, ctx):
    for step in range(steps):
        ctx.log(step, loss=0.5, accuracy=0.25, lr=1e-3, norm=2.0)

def block(pieces: int, loops: int, first: int, logs: bool, coin, ctx):
    wall, cpu, inside = [0.0, 0.0], [0.0, 0.0], 0.0
    process = time.process_time() - time.thread_time()
    for step in range(first, first + pieces):
        first_half = coin.random() < 0.5
        for has_point in (first_half, not first_half):
            began, thread = time.perf_counter(), time.thread_time()
            if has_point and logs:
                ctx.log(step, loss=0.5)
                inside += time.perf_counter() - began
            total = 0.0
            for i in range(loops):
                total += i * 0.5
            cpu[has_point] += time.thread_time() - thread
            wall[has_point] += time.perf_counter() - began
    others = time.process_time() - time.thread_time() - process
    return {"wall": wall, "cpu": cpu, "inside": inside, "others": others}

def stretch(number: int, pieces: int, loops: int, logs: bool, coin, coordinator: int, ctx):
    # What was logged before is on its way while the first block runs: nothing of it is counted.
    step = number * BLOCKS * pieces
    block(pieces, loops, step, logs, coin, ctx)
    began = time.clock_gettime(coordinator)
    found = [block(pieces, loops, step + n * pieces, logs, coin, ctx) for n in range(1, BLOCKS)]
    return {"blocks": found, "coordinator": time.clock_gettime(coordinator) - began}

def work(pairs: int, pieces: int, loops: int, coordinator: int, ctx):
    coin, found = random.Random(0), []
    for pair in range(pairs):
        order = (True, False) if pair % 2 else (False, True)
        found.append({
            logs: stretch(2 * pair + logs, pieces, loops, logs, coin, coordinator, ctx)
            for logs in order
        })
    with open("found.json", "w") as file:
        json.dump([[pair[False], pair[True]] for pair in found], file)
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


def loops_of_5_ms() -> int:
    """By the fastest of many: what is counted while the processor wakes up makes short pieces, and
    so more than 100 points a second."""
    loops, spans = 20_000, []
    for _ in range(200):
        began = time.perf_counter()
        total = 0.0
        for i in range(loops):
            total += i * 0.5
        spans.append(time.perf_counter() - began)
    return round(loops * 0.005 / min(spans))


class Cost(NamedTuple):
    """Of a pair of stretches, in percent."""

    wall: float
    processor: float
    inside: float
    nothing: float  # the halves of the stretch without points


def cost_of(silent: dict[str, Any], logging: dict[str, Any]) -> Cost:
    """Of two neighbouring stretches of a task, see ``TARGET``."""

    def added(stretch: dict[str, Any], what: str) -> float:
        """What one half is longer, as a share of both; the median of the blocks, as a moment in
        which something else ran is no cost of ours."""
        halves = [block[what] for block in stretch["blocks"]]
        return median((point - without) / (2 * without) for without, point in halves)

    def beside(stretch: dict[str, Any], seconds: float) -> float:
        return seconds / sum(sum(block["wall"]) for block in stretch["blocks"])

    def of_threads(stretch: dict[str, Any]) -> float:
        return beside(stretch, sum(block["others"] for block in stretch["blocks"]))

    threads = of_threads(logging) - of_threads(silent)
    coordinator = beside(logging, logging["coordinator"]) - beside(silent, silent["coordinator"])
    inside = beside(logging, sum(block["inside"] for block in logging["blocks"]))
    return Cost(
        100 * (added(logging, "wall") + threads),
        100 * (added(logging, "cpu") + threads + coordinator),
        100 * inside,
        100 * added(silent, "cpu"),
    )


def costs_of_a_task(pairs: int, pieces: int, loops: int) -> list[Cost]:
    coordinator = ~os.getpid() << 3 | 2  # the clock that `processor_s` reads
    muster.sweep(
        "target.py:work",
        grid={"pairs": [pairs], "pieces": [pieces], "loops": [loops], "coordinator": [coordinator]},
        run_dir=f"work-{time.monotonic_ns()}", devices="cpu:1",
    )  # fmt: skip
    return [cost_of(*pair) for pair in json.loads(Path("found.json").read_text())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--pairs", type=int, default=20, help="of stretches of 3 s")
    parser.add_argument("--repeats", type=int, default=7, help="of the rate")
    arguments = parser.parse_args()
    steps, repeats = (5_000, 1) if arguments.quick else (200_000, arguments.repeats)
    pairs, pieces = (2, 4) if arguments.quick else (arguments.pairs, 50)
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        Path("target.py").write_text(TARGET)
        rates = [rate(steps) for _ in range(repeats)]
        costs = costs_of_a_task(pairs, pieces, loops_of_5_ms())
    of = dict(zip(("wall time", "processor time", "inside the calls", "without points"),
                  zip(*costs, strict=True), strict=True))  # fmt: skip
    points = median(rates)
    table(
        ["what", "median", "goal", ""],
        [
            ["points/s through one coordinator", f"{points:,.0f}", f"{GOAL_POINTS_PER_S:,}",
             goal("points/s through one coordinator", f"≥ {GOAL_POINTS_PER_S:,}",
                  f"{points:,.0f}", points >= GOAL_POINTS_PER_S, shown=False)],
            *(
                [f"cost of 100 points/s, {what}, %", told(values), f"< {GOAL_PERCENT}",
                 goal(f"cost of 100 points/s, {what}, %", f"< {GOAL_PERCENT}", told(values),
                      at_most(values, GOAL_PERCENT), shown=False)
                 if what != "without points" else ""]
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
