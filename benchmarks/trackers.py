"""What a tracker costs the run that it follows, and how long the end of the run waits for it.

python benchmarks/trackers.py                    # about 12 minutes
python benchmarks/trackers.py --quick

A sweep on all cores but one works in pieces of 10 ms and logs a point after each, 100 a second from
each task; it is run with each tracker, and with an MLflow server that takes connections and never
answers. Whole runs beside each other drift by several percent, which hides a cost below one.
So the tracker's processes are stopped for half a second and go on for as long, in turn, while the
run works: the cost is the median ratio of a piece's mean time while they go on, to that in the two
spans beside while they are stopped, with its 95 % interval; where that has the goal in it, the goal
is not judged. What was logged while they were stopped
they send afterwards, so this is up to twice what a tracker costs that is never stopped. Beside
it stands the processor time that they took, which a machine without an idle core would pay.
The end: what the whole command took beyond the work, and beyond a run without a tracker.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import chdir, contextmanager, nullcontext, suppress
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent))
import psutil

import muster
from measuring import at_most, goal, interval, machine, table, write_json
from muster.api.trackers.tracker import TRACKERS

GOAL_PERCENT, END_GOAL_S = 1.0, 31.0
SPAN_S, SETTLE_S = 0.5, 0.05
TARGET = """
import json, time

def work(ctx, seconds, loops, name, seed):
    ended, pieces, step = time.time() + seconds, [], 0
    while (began := time.time()) < ended:
        cpu, total = time.process_time(), 0.0
        for i in range(loops):
            total += i * 0.5
        ctx.log(step, total=total)
        step += 1
        pieces.append((began, time.time() - began, time.process_time() - cpu))
    with open(f"{name}-{seed}.json", "w") as file:
        json.dump(pieces, file)
"""


class Piece(NamedTuple):
    began: float
    wall: float
    cpu: float


class Span(NamedTuple):
    """``goes_on``: whether the tracker did; ``cpu_s``: what its processes had used by then."""

    began: float
    goes_on: bool
    cpu_s: float


class Followed(NamedTuple):
    pieces: list[Piece]
    spans: list[Span]
    rest_s: float  # of the whole command beside the work


def loops_of_10_ms() -> int:
    loops, total = 200_000, 0.0
    began = time.perf_counter()
    for i in range(loops):
        total += i * 0.5
    return round(loops * 0.01 / (time.perf_counter() - began))


def tracker_processes() -> list[psutil.Process]:
    """The tracker's process and what its library has started."""
    found: list[psutil.Process] = []
    for child in psutil.Process().children():
        with suppress(psutil.Error):
            if "muster.api.trackers.guard" in child.cmdline():
                found += [child, *child.children(recursive=True)]
    return found


@contextmanager
def stopping_in_turn(spans: list[Span], name: str) -> Iterator[None]:
    """Inside, trackers are stopped every other span, until a task called ``name`` has ended."""
    is_over = threading.Event()

    def turn() -> None:
        goes_on = True
        while not is_over.wait(SPAN_S) and not [*Path().glob(f"{name}-*.json")]:
            goes_on, cpu_s = not goes_on, 0.0
            for process in tracker_processes():
                with suppress(psutil.Error):
                    process.resume() if goes_on else process.suspend()
                    cpu_s += sum(process.cpu_times()[:2])
            spans.append(Span(time.time(), goes_on, cpu_s))
        for process in tracker_processes():
            with suppress(psutil.Error):
                process.resume()

    thread = threading.Thread(target=turn)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def follow(name: str, seconds: float, loops: int, tracker: str, uri: str = "") -> Followed:
    cores, spans = max(1, (os.cpu_count() or 1) - 1), list[Span]()
    os.environ["MLFLOW_TRACKING_URI"] = uri
    began = time.perf_counter()
    with stopping_in_turn(spans, name) if tracker else nullcontext():
        muster.sweep(
            "target.py:work", grid={"seconds": [seconds], "loops": [loops], "name": [name]},
            seeds=cores, run_dir=f"run-{name}", devices=f"cpu:{cores}", log_to=tracker,
        )  # fmt: skip
    wall = time.perf_counter() - began
    found = [json.loads(path.read_text()) for path in Path().glob(f"{name}-*.json")]
    pieces = [Piece(*piece) for some in found for piece in some]
    worked = max(piece.began + piece.wall for piece in pieces) - min(p.began for p in pieces)
    print(f"  {name}: {len(pieces):,} pieces, {len(spans)} spans", file=sys.stderr)
    return Followed(pieces, spans, wall - worked)


def costs(followed: Followed, of: int) -> list[float]:
    """In percent: each span in which the tracker goes on beside those around it."""
    spans, means = followed.spans, list[float | None]()
    for span, after in pairwise(spans):
        inside = [
            piece[of]
            for piece in followed.pieces
            if span.began + SETTLE_S < piece.began < after.began - SETTLE_S
        ]
        means.append(mean(inside) if len(inside) > 10 else None)  # else it began or ended there
    return [
        100 * (here / ((before + behind) / 2) - 1)
        for span, before, here, behind in zip(spans[1:], means, means[1:], means[2:], strict=False)
        if span.goes_on and before and here and behind
    ]


def shown(values: list[float]) -> str:
    if not values:
        return "-"
    return "{:+.2f} % [{:+.2f}, {:+.2f}]".format(median(values), *interval(values))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seconds", type=float, default=125.0, help="with each tracker")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    seconds = 16.0 if arguments.quick else arguments.seconds
    names = ["tensorboard"] if arguments.quick else list(TRACKERS)
    with (
        tempfile.TemporaryDirectory() as folder,
        chdir(folder),
        socket.create_server(("127.0.0.1", 0)) as silent,
    ):
        os.environ["TRACKIO_DIR"] = str(Path(folder) / "trackio")
        Path("target.py").write_text(TARGET)
        loops = loops_of_10_ms()
        base_s = follow("none", seconds / 10, loops, "").rest_s
        found = {name: follow(name, seconds, loops, name) for name in names}
        if not arguments.quick:
            uri = f"http://127.0.0.1:{silent.getsockname()[1]}"  # it accepts, and nobody reads
            found["hanging"] = follow("hanging", seconds, loops, "mlflow", uri)
    rows, record = [], {}
    for name, followed in found.items():
        wall, cpu = costs(followed, 1), costs(followed, 2)
        own_percent = 100 * max((span.cpu_s for span in followed.spans), default=0.0) / seconds
        end_s = followed.rest_s - base_s
        rows.append(
            [name, shown(wall), shown(cpu),
             goal(f"{name}, cost, wall time, %", f"< {GOAL_PERCENT:g}", shown(wall),
                  at_most(wall, GOAL_PERCENT), shown=False), f"{own_percent:.1f} %",
             f"{end_s:.1f} s"]
        )  # fmt: skip
        record[name] = {
            "wall_percent": wall, "cpu_percent": cpu, "own_percent_of_a_core": own_percent,
            "end_s": end_s,
        }  # fmt: skip
    table(
        ["tracker", "wall time of the work", "its processor time", f"< {GOAL_PERCENT:g} %",
         "the tracker's own, of a core", "at the end"],
        rows,
    )  # fmt: skip
    slowest, end_s = max(((name, found["end_s"]) for name, found in record.items()),
                         key=lambda one: one[1])  # fmt: skip
    goal("the end of a run waits for a tracker, s", f"< {END_GOAL_S:g}",
         f"at most {end_s:.1f} ({slowest})", end_s < END_GOAL_S)  # fmt: skip
    if arguments.quick:
        print("With --quick there is one tracker, and no figure means anything.")
    write_json(arguments.json, {"machine": machine(*TRACKERS), "span_s": SPAN_S, **record})


if __name__ == "__main__":
    main()
