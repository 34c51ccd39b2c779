"""The real coordinator with thousands of pilots and millions of tasks: what saturates first.

    python benchmarks/scale.py                                   # three sizes each way
    python benchmarks/scale.py --pilots 10000 --tasks 1000000    # one size
    python benchmarks/scale.py --quick

Real: the coordinator, its scheduler, its ledger on disk, the executor for SLURM, the mailboxes and
every frame in them. Pretended: SLURM's commands, small scripts here, and the pilots, all in one
process beside the coordinator, which answer as theirs would after the time that a task takes, and
compute nothing. Lengths are log-normal and as short as it takes to offer ``--offered`` tasks a
second, whatever the number of pilots. One task in 100 fails at first, one in 1,000 for good; a
pilot in 50 is lost with its tasks; the last task is long, and is divided.

- tasks/s: from the first commit of a result to the last;
- commit: results that share one, and how long it takes;
- result: from when a pilot has written it to when it is committed;
- lost: from a pilot's end to when the coordinator knows of it, by SLURM's answer;
- CPU: of the coordinator, from its start to its end. How it grows is the fitted exponent.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import multiprocessing
import os
import random
import re
import resource
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from measuring import growth, machine, table, write_json
from muster.api.sweeps.housekeeping import write_status
from muster.base.clock import Rhythm, SystemClock
from muster.base.journal import Journal
from muster.farm import wire
from muster.farm.canonical import decode, payload_and_key
from muster.farm.coordinator import Coordinator
from muster.farm.decisions import Policy, RetryPolicy
from muster.farm.events import Divided, Event, Results, Returned, WorkerDied, WorkerReady
from muster.farm.executors.base import Assignment
from muster.farm.executors.cluster import ClusterRequest, look_every_s
from muster.farm.executors.mailbox import HELLO, Reader, Writer, pilot_box, read_heartbeat
from muster.farm.executors.remote import CommandReader, pack_event
from muster.farm.executors.slurm import SlurmExecutor
from muster.farm.ledger.store import Ledger
from muster.farm.plan import Plan, Request
from muster.farm.task import (
    AttemptRecord,
    Finished,
    NewTask,
    Outcome,
    SlotSpec,
    TargetSpec,
    Task,
    TaskState,
)
from muster.farm.view import RunView
from muster.run.folder import RunFolder
from muster.run.requests import Ask

SIGMA = 1.0  # of the logarithm of a task's length
NUM_LENGTHS = 1 << 16
LONG_S = 2.0  # of the last task, and four looks: it is divided
VALUE = b'{"loss":0.123456,"accuracy":0.98}'


@dataclass(frozen=True)
class Size:
    pilots: int
    tasks: int
    offered: float  # tasks a second that the pilots could do

    @property
    def mean_s(self) -> float:
        return self.pilots / self.offered

    @property
    def num_lost(self) -> int:
        return max(1, self.pilots // 50)


# ---------------------------------------------------------------- pilots and SLURM, pretended


class PretendPilot:
    """Takes a pilot's commands, and answers each task once its time is over."""

    def __init__(self, folder: RunFolder, slot_id: int, job: int, every_s: float) -> None:
        box = pilot_box(folder, slot_id, job, 0)
        box.folder.mkdir(parents=True, exist_ok=True)
        self.job = job
        self.lengths: tuple[float, ...] = (0.0,)
        self.num_tasks, self._every_s = 1, every_s
        self._out = Writer(box.outbox, durable=False)
        self._out.add(wire.pack([HELLO, "host", 1]))
        self._inbox = Reader(box.inbox(read_heartbeat(folder).session))
        self._commands = CommandReader(self)
        self._rhythm = Rhythm(time.monotonic(), least_s=every_s)
        self._worker_id = 0
        self._held: deque[tuple[float, float, Task]] = deque()  # end, begin, task
        self._now = 0.0

    def turn(self, now: float) -> float:
        """Hear, answer, write; returns when to be called again."""
        self._now = now
        if now >= self._rhythm.due_s:
            frames = self._inbox.receive()
            if frames:
                self._rhythm.happened(now)
                self._commands.apply(frames)
            self._rhythm.looked(now)
        finished = []
        while self._held and self._held[0][0] <= now:
            finished.append(self._finished(*self._held.popleft()))
        if finished:
            self._tell(Results(self._worker_id, finished))
        if self._out.flush():
            self._rhythm.happened(now)
        return min(self._rhythm.due_s, self._held[0][0] if self._held else math.inf)

    def _tell(self, event: Event) -> None:
        self._out.add(pack_event(event))

    def _finished(self, end: float, begin: float, task: Task) -> Finished:
        seconds = end - begin
        is_bad = task.task_id % 1000 == 999 or (task.task_id % 100 == 99 and not task.tries)
        outcome = Outcome.EXCEPTION if is_bad else Outcome.OK
        # Its start and length add up to when it was written: see Watched.
        return Finished(
            task.task_id, task.token, outcome, time.time() - seconds, seconds, 0, 0, 100.0,
            VALUE, "pretended" if is_bad else "",
        )  # fmt: skip

    def start(self, worker_id: int, slot: SlotSpec) -> str:
        self._worker_id = worker_id
        self._tell(WorkerReady(worker_id, 1))
        return ""

    def send(self, worker_id: int, tasks: Sequence[Task], *, together: bool) -> None:
        for task in tasks:
            begin = max(self._now, self._held[-1][0] if self._held else 0.0)
            self._held.append((begin + self._length(task), begin, task))

    def _length(self, task: Task) -> float:
        if b"seconds" in task.payload:
            return float(decode(task.payload)["seconds"])
        if task.task_id % self.num_tasks == 0:
            return LONG_S + 4 * self._every_s
        return self.lengths[task.task_id % len(self.lengths)]

    def share(self, worker_id: int, task_id: int, others: int) -> None:
        """Give away half of what is left of the running task."""
        if not self._held or self._held[0][2].task_id != task_id:
            return
        end, begin, task = self._held[0]
        left, params = end - self._now, decode(task.payload)
        given = [{"i": params["i"], "of": task_id, "at": end, "seconds": left / 2}] * (left > 0.2)
        kept = {**params, "until": end} if given else params
        if given:
            self._held[0] = (end - left / 2, begin, task)
        self._tell(Divided(worker_id, task_id, task.token, kept, given))

    def revoke(self, worker_id: int) -> None:
        back = [task for _, begin, task in self._held if begin > self._now]
        while self._held and self._held[-1][1] > self._now:
            self._held.pop()
        self._tell(Returned(worker_id, [task.task_id for task in back]))

    def end(self, worker_id: int, *, kill: bool) -> None:
        self._held.clear()
        self._tell(WorkerDied(worker_id, 0, None, "it was told to end"))

    def stop_task(self, worker_id: int, task_id: int, *, pauses: bool) -> None:
        raise NotImplementedError

    def confirm(self, worker_id: int, serial: int) -> None:
        raise NotImplementedError


def write_slurm(place: Path) -> None:
    """SLURM's commands: sbatch keeps the script, squeue shows a file that the yard writes."""
    lines: dict[str, str] = {
        "sbatch": f'n=$(ls {place}/jobs | wc -l); n=$((n + 1)); cp "$2" {place}/jobs/.$n; '
        f"mv {place}/jobs/.$n {place}/jobs/$n; echo $n",
        "squeue": f"cat {place}/queue",
        "scancel": "true",
        "scontrol": "true",
        "srun": "true",
    }
    (place / "jobs").mkdir()
    (place / "queue").write_text("")
    for name, line in lines.items():
        (place / name).write_text(f"#!/bin/sh\n{line}\n")
        (place / name).chmod(0o755)


def elements(script: str) -> Iterator[int]:
    ranges = re.search(r"--array=(\S+)", script)
    assert ranges is not None
    for part in ranges[1].split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


class Yard:
    """All pilots of a run, and what SLURM shows of them."""

    def __init__(self, place: Path, folder: RunFolder, size: Size) -> None:
        self._place, self._folder, self._size = place, folder, size
        draw = random.Random(size.pilots)
        mu = math.log(size.mean_s) - SIGMA**2 / 2
        self._lengths: tuple[float, ...] = tuple(
            draw.lognormvariate(mu, SIGMA) for _ in range(NUM_LENGTHS)
        )
        self._pilots: dict[int, PretendPilot] = {}
        self._due: list[tuple[float, int]] = []
        self._jobs = 0
        self._state: dict[tuple[int, int], str] = {}
        self._doomed = draw.sample(range(size.pilots), size.num_lost)
        self._lose_at = math.inf
        self.lost: list[tuple[int, float]] = []

    def serve(self) -> None:
        look_at = 0.0
        while not read_heartbeat(self._folder).is_closed:
            while (now := time.monotonic()) < look_at:
                while self._due and self._due[0][0] <= now:
                    _, slot_id = heapq.heappop(self._due)
                    if (pilot := self._pilots.get(slot_id)) is not None:
                        heapq.heappush(self._due, (pilot.turn(now), slot_id))
                first_s = self._due[0][0] if self._due else look_at
                time.sleep(max(0.0005, min(first_s, look_at) - time.monotonic()))
            look_at = now + 0.05
            self._take_jobs(now)
            self._lose(now)
        (self._place / "queue").write_text("")  # all have ended
        (self._place / "lost.json").write_text(json.dumps(self.lost))

    def _take_jobs(self, now: float) -> None:
        while (script := self._place / "jobs" / str(self._jobs + 1)).exists():
            self._jobs += 1
            every_s = look_every_s(self._size.pilots)
            for slot_id in elements(script.read_text()):
                pilot = PretendPilot(self._folder, slot_id, self._jobs, every_s)
                pilot.lengths, pilot.num_tasks = self._lengths, self._size.tasks
                self._pilots[slot_id] = pilot
                self._state[self._jobs, slot_id] = "RUNNING"
                heapq.heappush(self._due, (now, slot_id))
            self._show()
            if self._lose_at == math.inf:
                self._lose_at = now + self._pause_s()

    def _pause_s(self) -> float:
        return 0.6 * self._size.tasks / self._size.offered / (self._size.num_lost + 1)

    def _lose(self, now: float) -> None:
        """A node fails: its pilot says nothing any more, and SLURM knows."""
        while self._doomed and now >= self._lose_at:
            self._lose_at += self._pause_s()
            pilot = self._pilots.pop(slot_id := self._doomed.pop())
            self._state[pilot.job, slot_id] = "NODE_FAIL"
            self.lost.append((slot_id, time.time()))
            self._show()

    def _show(self) -> None:
        lines = [f"{job}_{slot} {state} 0 None\n" for (job, slot), state in self._state.items()]
        temporary = self._place / "queue.new"
        temporary.write_text("".join(lines))
        temporary.replace(self._place / "queue")


def serve_yard(place: Path, folder: Path, size: Size) -> None:
    Yard(place, RunFolder(folder), size).serve()


# ---------------------------------------------------------------- the coordinator, watched


class Histogram:
    """Counts in steps of 5 %: what a million values would take in memory is not measured."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def add(self, value: float) -> None:
        self._counts[round(math.log(max(value, 1e-6), 1.05))] += 1

    def quantile(self, share: float) -> float:
        left = share * sum(self._counts.values())
        for step in sorted(self._counts):
            left -= self._counts[step]
            if left <= 0:
                return float(1.05**step)
        return math.nan


@dataclass
class Watched:
    result_s: Histogram = field(default_factory=Histogram)
    commit_s: Histogram = field(default_factory=Histogram)
    commit_size: Histogram = field(default_factory=Histogram)
    first_s: float = 0.0
    last_s: float = 0.0
    num_done: int = 0
    num_divided: int = 0
    num_ready: int = 0
    ready_s: float = 0.0
    deaths: list[tuple[int, float]] = field(default_factory=list)


class WatchedLedger(Ledger):
    watched: Watched

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._sent: list[float] = []

    def record_done(self, records: Sequence[AttemptRecord], values: Any) -> None:
        super().record_done(records, values)
        self._sent += [r.finished.started_s + r.finished.seconds for r in records]

    def divide(self, task: Task, payload: bytes, given: Any) -> int:
        self.watched.num_divided += len(given)
        return super().divide(task, payload, given)

    def commit(self) -> None:
        began = time.time()
        super().commit()
        if not self._sent:
            return
        now, watched = time.time(), self.watched
        watched.first_s = watched.first_s or now
        watched.last_s = now
        watched.num_done += len(self._sent)
        watched.commit_s.add(now - began)
        watched.commit_size.add(len(self._sent))
        for sent in self._sent:
            watched.result_s.add(now - sent)
        self._sent.clear()


class WatchedExecutor(SlurmExecutor):
    watched: Watched
    slots: dict[int, int]

    def start(self, worker_id: int, slot: SlotSpec) -> str:
        self.slots[worker_id] = slot.slot_id
        return super().start(worker_id, slot)

    def poll(self, timeout_s: float) -> list[Event]:
        events = super().poll(timeout_s)
        for event in events:
            if isinstance(event, WorkerReady):
                self.watched.num_ready += 1
                if self.watched.num_ready == self._request.num_workers:
                    self.watched.ready_s = time.time()
            elif isinstance(event, WorkerDied) and event.outcome is Outcome.LOST:
                self.watched.deaths.append((self.slots[event.worker_id], time.time()))
        return events


def tasks_of(target_id: int, count: int) -> Iterator[NewTask]:
    make = payload_and_key("pretended")
    for i in range(count):
        payload, key = make({"i": i, "lr": 0.001})
        yield NewTask(key, target_id, payload)


def coordinate(place: Path, path: Path, size: Size) -> None:
    """The coordinator's process: what it finds goes to a file."""
    os.environ["PATH"] = f"{place}:{os.environ['PATH']}"
    folder, clock = RunFolder(path), SystemClock()
    watched = WatchedLedger.watched = WatchedExecutor.watched = Watched()
    WatchedExecutor.slots = {}
    ledger = WatchedLedger(folder.ledger)
    ledger.begin()
    target_id = ledger.target_id("pretended")
    ledger.commit()
    targets = {target_id: TargetSpec(name="pretended", is_divisible=True)}
    cluster = ClusterRequest(num_workers=size.pilots)
    slots = [SlotSpec(slot_id=n, label=f"slurm/{n}", devices=()) for n in range(size.pilots)]
    plan = Plan(
        folder=folder,
        targets=targets,
        slots=tuple(slots),
        policy=Policy(
            retry=RetryPolicy(exception_retries=1),
            keep_going=True,
            lead_s=max(0.3, 2 * look_every_s(size.pilots)),  # as for every run on SLURM
        ),
        total=size.tasks,
        feed=tasks_of(target_id, size.tasks),
    )

    class Beside(nullcontext[object]):
        def __init__(self) -> None:
            super().__init__()
            self.clock = clock

        def show(self, view: RunView) -> None:
            return

        def requests(self) -> list[Request]:
            return []

        def asked(self) -> list[Ask]:
            return []

        def do(self, view: RunView) -> tuple[list[Event], list[Request]]:
            write_status(folder, view)
            return [], []

    began, cpu = time.time(), time.process_time()
    executor = WatchedExecutor(
        Assignment(folder=folder, run_id="scale", targets=targets, cluster=cluster)
    )
    journal = Journal(folder.events, clock)
    ending = Coordinator(plan, ledger, executor, journal, Beside()).run()
    cpu = time.process_time() - cpu
    journal.close()
    ledger.close()
    ended = {state.name: n for state, n in ending.counts.items() if n}
    expected = size.tasks + watched.num_divided
    if ending.imbalance or sum(ended.values()) != expected or set(ended) - {"DONE", "FAILED"}:
        sys.exit(f"{expected:,} tasks have become {ended}: {ending.imbalance or ending.unusable}")
    (peak,) = re.findall(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    seconds = watched.last_s - watched.first_s
    quantiles = {
        name: [histogram.quantile(share) for share in (0.5, 0.99)]
        for name, histogram in (
            ("commit_size", watched.commit_size),
            ("commit_s", watched.commit_s),
            ("result_s", watched.result_s),
        )
    }
    record = {
        "tasks_per_s": watched.num_done / seconds,
        # None: it was over before all of them had come.
        "ready_s": watched.ready_s - began if watched.ready_s else None,
        "whole_s": time.time() - began,
        "cpu_s": cpu,
        "memory_mib": int(peak) / 1024,
        "num_failed": ended.get(TaskState.FAILED.name, 0),
        "num_divided": watched.num_divided,
        "deaths": watched.deaths,
        **quantiles,
    }
    (place / "found.json").write_text(json.dumps(record))


def measure(size: Size) -> dict[str, Any]:
    spawn = multiprocessing.get_context("spawn")
    before = _children_s()
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as path:
        place, folder = Path(path), RunFolder(Path(path) / "run")
        folder.create()
        write_slurm(place)
        yard = spawn.Process(target=serve_yard, args=(place, folder.path, size), daemon=True)
        coordinator = spawn.Process(target=coordinate, args=(place, folder.path, size))
        yard.start()
        coordinator.start()
        coordinator.join()
        if coordinator.exitcode:
            yard.terminate()
            sys.exit("the coordinator has failed")
        yard.join()
        found: dict[str, Any] = json.loads((place / "found.json").read_text())
        found["all_cpu_s"] = _children_s() - before
        found["ledger_bytes"] = folder.ledger.stat().st_size
        noticed = []
        for slot_id, since in json.loads((place / "lost.json").read_text()):
            later = [at - since for slot, at in found["deaths"] if slot == slot_id and at > since]
            noticed += [min(later)] if later else []
    del found["deaths"]
    return {"pilots": size.pilots, "tasks": size.tasks, **found, "lost_s": sorted(noticed)}


def _children_s() -> float:
    """The processor seconds of all children so far: coordinator, pilots, SLURM's commands."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


# ---------------------------------------------------------------- growth


def cells(found: dict[str, Any]) -> list[str]:
    sizes, commits, results = found["commit_size"], found["commit_s"], found["result_s"]
    lost = found["lost_s"]
    shown = f"{lost[len(lost) // 2]:.1f} / {lost[-1]:.1f}" if lost else "-"
    return [
        f"{found['pilots']:,}", f"{found['tasks']:,}", f"{found['tasks_per_s']:,.0f}",
        f"{found['cpu_s']:.1f}", f"{found['all_cpu_s']:.0f}", f"{found['memory_mib']:.0f}",
        f"{sizes[0]:,.0f} / {sizes[1]:,.0f}",
        f"{commits[0] * 1e3:.0f} / {commits[1] * 1e3:.0f}",
        f"{results[0]:.2f} / {results[1]:.2f}", shown,
        "-" if found["ready_s"] is None else f"{found['ready_s']:.1f}",
    ]  # fmt: skip


HEADERS = ["pilots", "tasks", "tasks/s", "CPU, s", "with the pilots'", "MiB",
           "results a commit, median / 99 %", "commit, ms", "result, s", "lost, s: median / most",
           "all ready, s"]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pilots", nargs="+", type=int, default=[100, 1000, 10_000])
    parser.add_argument("--tasks", nargs="+", type=int, default=[30_000, 100_000, 300_000])
    parser.add_argument("--offered", type=float, default=40_000.0, help="tasks a second")
    parser.add_argument("--quick", action="store_true", help="10 to 40 pilots, 2,000 tasks")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.quick:
        args.pilots, args.tasks, args.offered = [10, 20, 40], [2_000], 4_000.0
    pilots, tasks = sorted(args.pilots), sorted(args.tasks)
    fixed_pilots, fixed_tasks = pilots[len(pilots) // 2], tasks[len(tasks) // 2]
    sizes = {(fixed_pilots, n) for n in tasks} | {(n, fixed_tasks) for n in pilots}
    found = {}
    for key in sorted(sizes):
        found[key] = measure(Size(*key, args.offered))
        print(f"  {key[0]:,} pilots, {key[1]:,} tasks: {found[key]}", file=sys.stderr)
    about = machine()
    print(f"{about['processor']}, {about['cores']} cores, {about['date']}, {about['versions']}")
    table(HEADERS, [cells(one) for one in found.values()])
    for what, keys in (
        ("tasks", [(fixed_pilots, n) for n in tasks]),
        ("pilots", [(n, fixed_tasks) for n in pilots]),
    ):
        if len(keys) < 2:
            continue
        amounts = [found[key][what] for key in keys]
        for cost, unit in (("cpu_s", "processor time"), ("memory_mib", "memory")):
            costs = [found[key][cost] for key in keys]
            growth(f"{unit} of the coordinator", what, amounts, costs)
    write_json(args.json, {"machine": about, "figures": list(found.values())})


if __name__ == "__main__":
    main()
