"""What a tracker costs the run that it follows, and how long the end of the run waits for it.

python benchmarks/trackers.py                    # about 25 minutes
python benchmarks/trackers.py --quick

A sweep on all cores but one does a fixed amount of work and logs 100 points a second from each
task; it is run without a tracker and with each of them in turn, and with an MLflow server that
takes connections and never answers. The work: seconds from the first task's start to the last
one's end.
The end: what the whole command took beyond that and beyond a run without a tracker.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import muster
from measuring import alternate, held, machine, summary, table, write_json
from muster.api.trackers.tracker import TRACKERS

GOAL_PERCENT, END_GOAL_S = 1.0, 31.0
TARGET = """
import time

def work(ctx, pieces, loops, seed):
    began = time.time()
    for step in range(pieces):
        total = 0.0
        for i in range(loops):
            total += i * 0.5
        ctx.log(step, total=total)
    return {"began": began, "ended": time.time()}
"""


def loops_of_10_ms() -> int:
    loops, total = 200_000, 0.0
    began = time.perf_counter()
    for i in range(loops):
        total += i * 0.5
    return round(loops * 0.01 / (time.perf_counter() - began))


def seconds(
    pieces: int, loops: int, tracker: str, uri: str, walls: dict[str, list[float]], name: str
) -> float:
    """Of the work; the rest goes into ``walls``."""
    folder, cores = f"run-{time.monotonic_ns()}", max(1, (os.cpu_count() or 1) - 1)
    os.environ["MLFLOW_TRACKING_URI"] = uri
    began = time.perf_counter()
    run = muster.sweep(
        "target.py:work", grid={"pieces": [pieces], "loops": [loops]}, seeds=cores,
        run_dir=folder, devices=f"cpu:{cores}", log_to=tracker,
    )  # fmt: skip
    wall = time.perf_counter() - began
    rows = run.results().to_pylist()
    work = max(row["ended"] for row in rows) - min(row["began"] for row in rows)
    walls.setdefault(name, []).append(wall - work)
    return work


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    pieces, repeats = (100, 1) if arguments.quick else (3000, 5)
    names = ["tensorboard"] if arguments.quick else list(TRACKERS)
    walls: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as silent:
        os.chdir(folder)
        os.environ["TRACKIO_DIR"] = str(Path(folder) / "trackio")
        Path("target.py").write_text(TARGET)
        loops = loops_of_10_ms()
        one = partial(seconds, pieces, loops, walls=walls)
        contenders: dict[str, Callable[[], float]] = {
            "none": partial(one, tracker="", uri="", name="none")
        }
        for name in names:
            contenders[name] = partial(one, tracker=name, uri="", name=name)
        if not arguments.quick:
            uri = f"http://127.0.0.1:{silent.getsockname()[1]}"  # it accepts, and nobody reads
            contenders["hanging"] = partial(one, tracker="mlflow", uri=uri, name="hanging")
        times = alternate(contenders, repeats)
        os.chdir("/")
    base, base_end = statistics.median(times["none"]), statistics.median(walls["none"])
    costs = {n: 100 * (statistics.median(times[n]) / base - 1) for n in times if n != "none"}
    ends = {n: statistics.median(walls[n]) - base_end for n in costs}
    table(
        ["tracker", "of the work", f"< {GOAL_PERCENT:g} %", "at the end", f"< {END_GOAL_S:g} s"],
        [
            [n, f"{costs[n]:+.2f} %", held(costs[n] < GOAL_PERCENT), f"{ends[n]:.1f} s",
             held(ends[n] < END_GOAL_S)]
            for n in costs
        ],
    )  # fmt: skip
    if len(costs) == 1:
        print("With --quick there is one tracker, and no figure means anything.")
    record = {
        "machine": machine(*TRACKERS),
        "work_s": {name: summary(values) for name, values in times.items()},
        "rest_s": {name: summary(values) for name, values in walls.items()},
        "cost_percent": costs,
        "end_s": ends,
    }
    write_json(arguments.json, record)


if __name__ == "__main__":
    main()
