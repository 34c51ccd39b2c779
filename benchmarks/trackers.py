"""What a tracker costs the run that it follows, and how long the end of the run waits for it.

python benchmarks/trackers.py                    # about 9 minutes
python benchmarks/trackers.py --quick

A sweep on all cores but one works in pieces of 1 ms and logs a point after ten of them, 100 a
second from each task; it is run with each tracker, and with an MLflow server that takes connections
and never answers. A machine's speed drifts by several percent within seconds, which hides a cost
below one. So once a tracker has begun, its processes are stopped for 25 ms and go on for as long,
in turn, while the run works. In stretches of 2.5 s, those that go on are compared with those that
are stopped: by the mean time of a piece, as a tracker works now and then. The cost is the median of
these ratios with its 95 % interval; where that has the goal in it, the goal is not judged. What was
logged while they were stopped they send afterwards, so this is up to twice what a tracker costs
that is never stopped.

Two things are judged: the processor time of the work, which a tracker beside it lengthens through
caches and memory, and which is told from what else the machine does; and its wall time, in which
waiting for a core is as well. Beside them stands the processor time that the tracker took per
second of the run, once it had begun. A machine without an idle core would pay that; there the run
comes first, as trackers and their helpers are nicer than its workers. Until 28 November 2026 spans
were half a second long, and only wall time was judged: its interval was six percent wide.
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
from bisect import bisect
from collections.abc import Sequence
from contextlib import chdir, suppress
from pathlib import Path
from statistics import mean
from typing import NamedTuple, Self

sys.path.insert(0, str(Path(__file__).parent))
import psutil

import muster
from measuring import at_most, goal, machine, processor_s, table, told, write_json
from muster.api.trackers.tracker import TRACKERS

GOAL_PERCENT, END_GOAL_S = 1.0, 31.0
#: How long a tracker is stopped or goes on; how long that takes to be so; what is compared.
SPAN_S, SETTLE_S, STRETCH_S = 0.025, 0.002, 2.5
#: A tracker imports its library, and makes what it sends to, before it is measured.
START_S = 10.0
TARGET = """
import json, time

def work(ctx, seconds, loops, name, seed):
    ended, pieces, step = time.time() + seconds, [], 0
    while (began := time.time()) < ended:
        cpu, total = time.thread_time(), 0.0
        for i in range(loops):
            total += i * 0.5
        pieces.append((began, time.time() - began, time.thread_time() - cpu))
        step += 1
        if step % 10 == 0:
            ctx.log(step, total=total)
    with open(f"{name}-{seed}.json", "w") as file:
        json.dump(pieces, file)
"""


class Piece(NamedTuple):
    began: float
    wall: float
    cpu: float


class Span(NamedTuple):
    """``goes_on``: whether the tracker did."""

    began: float
    goes_on: bool


class Followed(NamedTuple):
    pieces: list[Piece]
    spans: list[Span]
    own: float  # processor seconds of the tracker for each second
    rest_s: float  # of the whole command beside the work


def loops_of_1_ms() -> int:
    loops, spans = 20_000, []
    for _ in range(200):
        total, began = 0.0, time.perf_counter()
        for i in range(loops):
            total += i * 0.5
        spans.append(time.perf_counter() - began)
    return round(loops * 0.001 / min(spans))


class Stopping(threading.Thread):
    """Stops trackers every other span, until a task called ``name`` has ended. ``own``: what they
    used of the processor for each second of that time.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.spans: list[Span] = []
        self.own = 0.0
        self._name = name
        self._over = threading.Event()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()

    def run(self) -> None:
        while not self._processes():
            if self._over.wait(0.1):
                return
        if self._over.wait(START_S):
            return
        began, goes_on, before = time.time(), True, self._processor_s()
        processes, looked = self._processes(), began
        while not self._over.wait(SPAN_S) and not [*Path().glob(f"{self._name}-*.json")]:
            goes_on = not goes_on
            if goes_on and time.time() - looked > 1:  # its process may have been started anew
                processes, looked = self._processes(), time.time()
            for process in processes:
                with suppress(psutil.Error):
                    process.resume() if goes_on else process.suspend()
            self.spans.append(Span(time.time(), goes_on))
        self.own = (self._processor_s() - before) / (time.time() - began)
        for process in self._processes():
            with suppress(psutil.Error):
                process.resume()

    def _processes(self) -> list[psutil.Process]:
        """The tracker's process and what its library has started."""
        found: list[psutil.Process] = []
        for child in psutil.Process().children():
            with suppress(psutil.Error):
                if "muster.api.trackers.guard" in child.cmdline():
                    found += [child, *child.children(recursive=True)]
        return found

    def _processor_s(self) -> float:
        total = 0.0
        for process in self._processes():
            with suppress(OSError):
                total += processor_s(process.pid)
        return total


def follow(name: str, seconds: float, loops: int, tracker: str, uri: str = "") -> Followed:
    cores = max(1, (os.cpu_count() or 1) - 1)
    os.environ["MLFLOW_TRACKING_URI"] = uri
    began = time.perf_counter()
    with Stopping(name) as stopping:
        muster.sweep(
            "target.py:work", grid={"seconds": [seconds], "loops": [loops], "name": [name]},
            seeds=cores, run_dir=f"run-{name}", devices=f"cpu:{cores}", log_to=tracker,
        )  # fmt: skip
    wall = time.perf_counter() - began
    found = [json.loads(path.read_text()) for path in Path().glob(f"{name}-*.json")]
    pieces = [Piece(*piece) for some in found for piece in some]
    worked = max(piece.began + piece.wall for piece in pieces) - min(p.began for p in pieces)
    print(f"  {name}: {len(pieces):,} pieces, {len(stopping.spans):,} spans", file=sys.stderr)
    return Followed(pieces, stopping.spans, stopping.own, wall - worked)


def costs(pieces: Sequence[Piece], spans: Sequence[Span], of: int) -> list[float]:
    """In percent, of each stretch: pieces while the tracker goes on beside those while it is
    stopped; ``of``: which figure of a piece.
    """
    starts = [span.began for span in spans]
    stretches: dict[int, dict[bool, list[float]]] = {}
    for piece in pieces:
        at = bisect(starts, piece.began - SETTLE_S) - 1
        if 0 <= at < len(spans) - 1 and piece.began + piece.wall < starts[at + 1]:
            number = int((starts[at] - starts[0]) / STRETCH_S)
            both = stretches.setdefault(number, {True: [], False: []})
            both[spans[at].goes_on].append(piece[of])
    return [
        100 * (mean(both[True]) / mean(both[False]) - 1)
        for both in stretches.values()
        if min(map(len, both.values())) > 100  # else it ended there
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seconds", type=float, default=90.0, help="with each tracker")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    seconds = 22.0 if arguments.quick else arguments.seconds
    names = ["tensorboard"] if arguments.quick else list(TRACKERS)
    with (
        tempfile.TemporaryDirectory() as folder,
        chdir(folder),
        socket.create_server(("127.0.0.1", 0)) as silent,
    ):
        os.environ["TRACKIO_DIR"] = str(Path(folder) / "trackio")
        Path("target.py").write_text(TARGET)
        loops = loops_of_1_ms()
        base_s = follow("none", seconds / 10, loops, "").rest_s
        found = {name: follow(name, seconds, loops, name) for name in names}
        if not arguments.quick:
            uri = f"http://127.0.0.1:{silent.getsockname()[1]}"  # it accepts, and nobody reads
            found["hanging"] = follow("hanging", seconds, loops, "mlflow", uri)
    rows, record = [], {}
    for name, followed in found.items():
        cpu, wall = (costs(followed.pieces, followed.spans, of) for of in (2, 1))
        own_percent, end_s = 100 * followed.own, followed.rest_s - base_s
        words = [
            goal(f"{name}, cost, {what}, %", f"< {GOAL_PERCENT:g}", told(values),
                 at_most(values, GOAL_PERCENT), shown=False)
            for what, values in (("processor time", cpu), ("wall time", wall))
        ]  # fmt: skip
        rows.append([name, told(cpu), words[0], told(wall), words[1], f"{own_percent:.1f} %",
                     f"{end_s:.1f} s"])  # fmt: skip
        record[name] = {
            "wall_percent": wall, "cpu_percent": cpu, "own_percent_of_a_core": own_percent,
            "end_s": end_s,
        }  # fmt: skip
    table(
        ["tracker", "processor time of the work, %", f"< {GOAL_PERCENT:g}", "its wall time, %",
         f"< {GOAL_PERCENT:g}", "the tracker's own, of a core", "at the end"],
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
