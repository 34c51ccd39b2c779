"""Workers as processes of this machine."""

from __future__ import annotations

import dataclasses
import os
import selectors
import signal
import time
from collections.abc import Container, Sequence
from contextlib import suppress
from dataclasses import dataclass

from muster.base import processes
from muster.base.reaper import Reaper
from muster.farm import canonical, wire
from muster.farm.events import Event, WorkerDied
from muster.farm.executors.base import Assignment
from muster.farm.executors.head_start import HeadStart
from muster.farm.executors.memory_limits import MemoryGroups, MemoryWatch, ends_first
from muster.farm.executors.worker_process import (
    TRACE_BYTES,
    Begun,
    Channel,
    Worker,
    begin_worker,
    log_tail,
    reason_of,
)
from muster.farm.task import Outcome, SlotSpec, Task
from muster.farm.worker.files import remove_kept

#: How long a worker that is to be killed may take after TERM.
GRACE_S = 2.0
#: How long the driver may take to give a dead worker's memory back.
_RELEASE_S = 10.0
_CHECK_EVERY_S = 1.0
_LOOK_EVERY_S = 0.05  # only where the kernel cannot tell us of a death
#: A function that has been told to end and has not is likely to lose its worker.
_SPARE_S = 0.1
_LOG_LIMIT = 256 << 20


@dataclass
class _Release:
    """A worker that is gone, whose device memory is still to come back."""

    death: WorkerDied
    pids: tuple[int, ...]
    devices: tuple[str, ...]
    deadline_s: float


class LocalExecutor:
    """One process per worker, each the leader of its own session, all dying with this one."""

    def __init__(self, assignment: Assignment) -> None:
        self._assignment = assignment
        self._workers: dict[int, Worker] = {}
        self._selector = selectors.DefaultSelector()
        self._releasing: list[_Release] = []
        self._not_started: list[WorkerDied] = []
        #: By slot. They have not imported the target, so the device is still their predecessor's.
        self._spares: dict[int, Begun] = {}
        self._has_functions = any(t.kind == "function" for t in assignment.targets.values())
        self._groups: MemoryGroups | None = None
        self._may_group = True
        self._logs: set[str] = set()
        self._checked = time.monotonic()
        self._was_subreaper = processes.set_subreaper(True)
        head_start = assignment.head_start
        if head_start is None or head_start.run_id != assignment.run_id:
            processes.end_marked(assignment.run_id)  # what an earlier coordinator has left behind
            head_start = HeadStart(assignment.run_id)
        self._mark, self._lifeline, self._our_end, self._spares = head_start.hand_over()
        self._reaper = Reaper(self._mark)

    # ------------------------------------------------------------------ the five questions

    def start(self, worker_id: int, slot: SlotSpec) -> str:
        log = self._assignment.folder.worker_log(slot.slot_id).absolute()
        if slot.devices and (lost := self._assignment.why_lost(slot.devices)):
            self._not_started.append(WorkerDied(worker_id, None, None, lost))
            return log.name
        log_start = log.stat().st_size if log.exists() else 0
        spare = self._spares.pop(slot.slot_id, None)
        if spare is not None and (spare.slot != slot or spare.process.poll() is not None):
            spare.end()  # begun ahead for another placement, or something has killed it
            spare = None
        _, process, ours, memory = spare or self._begin(slot)
        log.touch()  # one that was begun ahead opens it only when it is told which it is

        def want_write(wanted: bool) -> None:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if wanted else 0)
            self._selector.modify(ours, events, worker)

        self._logs.add(log.stem)
        worker = Worker(worker_id, slot, process, Channel(ours, want_write), str(log))
        worker.tasks_end, worker.memory = log_start, memory
        worker.ooms_before = processes.out_of_memory_kills()
        if slot.most_host_mib is not None:
            self._limit_memory(worker, slot.most_host_mib)
        self._selector.register(ours, selectors.EVENT_READ, worker)
        if hasattr(os, "pidfd_open"):
            worker.pidfd = os.pidfd_open(process.pid)
            self._selector.register(worker.pidfd, selectors.EVENT_READ, worker)
        self._workers[worker_id] = worker
        setup = {
            "targets": {
                str(i): dataclasses.asdict(spec) for i, spec in self._assignment.targets.items()
            },
            "log": worker.log,
            "folder": str(self._assignment.folder.path.absolute()),
            "device": "cuda:0" if slot.kind == "cuda" else "cpu",
            "is_piloted": self._assignment.is_piloted,
        }
        worker.channel.send(wire.pack([wire.SETUP], canonical.encode(setup)))
        return log.name

    def _begin(self, slot: SlotSpec) -> Begun:
        about = self._assignment
        with about.folder.worker_log(slot.slot_id).open("ab") as output:
            return begin_worker(slot, self._mark, output.fileno(), self._lifeline, about.python)

    def send(self, worker_id: int, tasks: Sequence[Task], *, together: bool) -> None:
        self.pass_on(worker_id, wire.pack_tasks(tasks, together=together))

    def pass_on(self, worker_id: int, frame: bytes) -> None:
        """Hand a worker tasks that are packed for it already."""
        worker = self._workers.get(worker_id)
        if worker is not None:
            worker.channel.send(frame)

    def share(self, worker_id: int, task_id: int, others: int) -> None:
        self._tell(worker_id, wire.SHARE, task_id, others)

    def revoke(self, worker_id: int) -> None:
        self._tell(worker_id, wire.REVOKE)

    def stop_task(self, worker_id: int, task_id: int, *, pauses: bool) -> None:
        worker = self._tell(worker_id, wire.STOP_TASK, task_id, pauses)
        if worker is None or pauses or worker.slot.slot_id in self._spares:
            return
        if self._has_functions:
            worker.spare_at = time.monotonic() + _SPARE_S

    def _tell(self, worker_id: int, *words: object) -> Worker | None:
        """Send a worker a frame; None where there is no such worker any more."""
        worker = self._workers.get(worker_id)
        if worker is not None:
            worker.channel.send(wire.pack([*words]))
        return worker

    def confirm(self, worker_id: int, serial: int) -> None:
        self._tell(worker_id, wire.CONFIRMED, serial)

    @property
    def worker_ids(self) -> list[int]:
        """Workers whose death has not been reported yet."""
        return [*self._workers, *(release.death.worker_id for release in self._releasing)]

    def warn(self, worker_id: int) -> None:
        """Tell a worker that it will soon lose its place: its task should save and end."""
        self._tell(worker_id, wire.WARN)

    def end(self, worker_id: int, *, kill: bool) -> None:
        if not kill:
            self._tell(worker_id, wire.STOP)
            return
        worker = self._workers.get(worker_id)
        if worker is None:
            return
        worker.was_killed = True
        if worker.kill_at is None:
            processes.signal_group(worker.process.pid, signal.SIGTERM)
            worker.kill_at = time.monotonic() + GRACE_S

    def poll(self, timeout_s: float) -> list[Event]:
        workers, now = self._workers.values(), time.monotonic()
        deadlines = [due for w in workers for due in (w.kill_at, w.spare_at) if due is not None]
        deadlines += [w.watch.due_s for w in workers if w.watch is not None]
        wait_s = min([timeout_s, *(max(0.0, due - now) for due in deadlines)])
        if self._releasing or any(worker.pidfd < 0 for worker in self._workers.values()):
            wait_s = min(wait_s, _LOOK_EVERY_S)
        events: list[Event] = [*self._not_started]
        self._not_started.clear()
        dead: dict[int, Worker] = {}
        if self._workers:  # they begin before it, and no task has begun
            self._reaper.check()
        for key, mask in self._selector.select(0.0 if events else max(0.0, wait_s)):
            worker: Worker = key.data
            if key.fd == worker.pidfd:
                dead[worker.worker_id] = worker
                continue
            if mask & selectors.EVENT_WRITE:
                worker.channel.flush()
            if mask & selectors.EVENT_READ:
                worker.read(events)
        for worker in self._workers.values():
            if worker.pidfd < 0 and worker.process.poll() is not None:
                dead[worker.worker_id] = worker
        self._escalate()
        self._watch_memory(dead)
        self._start_spares()
        for worker in dead.values():
            self._reap(worker, events)
        self._await_memory(events)
        self._housekeep()
        return events

    def fileno(self) -> int:
        """Readable while ``poll`` has something to say; for a loop that waits for more than us."""
        return self._selector.fileno()

    def close(self) -> None:
        for worker in self._workers.values():
            processes.signal_group(worker.process.pid, processes.KILL)
        sessions = [worker.process.pid for worker in self._workers.values()]
        for spare in self._spares.values():
            spare.end()
        for worker in list(self._workers.values()):
            self._forget(worker)
        processes.end_marked(self._mark, sessions)
        processes.reap_adopted(sessions)
        if self._groups is not None:
            self._groups.close()
        for log in self._logs:
            remove_kept(self._assignment.folder.spare_of(log))
        self._selector.close()
        self._reaper.dismiss()
        os.close(self._lifeline)
        os.close(self._our_end)
        # A program that called muster.sweep is not to inherit orphans for the rest of its life.
        processes.set_subreaper(self._was_subreaper)

    # ------------------------------------------------------------------ ending

    def _escalate(self) -> None:
        now = time.monotonic()
        for worker in self._workers.values():
            if worker.kill_at is not None and now >= worker.kill_at:
                processes.signal_group(worker.process.pid, processes.KILL)
                worker.kill_at = now + GRACE_S

    def _limit_memory(self, worker: Worker, most_mib: float) -> None:
        """Before it is told what to do: the kernel keeps its limit, or we look."""
        ends_first(worker.process.pid)
        if self._may_group and self._groups is None:
            self._groups = MemoryGroups.open()
            self._may_group = self._groups is not None
        if self._groups is not None:
            worker.group = self._groups.make(worker.process.pid, most_mib)
        if worker.group is None:
            worker.watch = MemoryWatch(worker.process.pid, most_mib)

    def _watch_memory(self, dead: Container[int]) -> None:
        """Kill what is above its limit without notice: it may take more in the meantime.

        What a program held that has ended since is given back; what a function left is not.
        """
        now = time.monotonic()
        for worker in self._workers.values():
            watch = worker.watch
            if watch is None or now < watch.due_s or worker.worker_id in dead:
                continue
            began_s = time.time()
            if watch.begin():
                worker.looked_s = began_s
            took = watch.look()
            if took and (self._has_functions or not worker.is_of_past):
                worker.took = took
                worker.watch, worker.was_killed = None, True
                processes.signal_group(worker.process.pid, processes.KILL)

    def _start_spares(self) -> None:
        now = time.monotonic()
        for worker in self._workers.values():
            if worker.spare_at is not None and now >= worker.spare_at:
                worker.spare_at = None
                with suppress(OSError):  # no room for one more beside it: it is not needed yet
                    self._spares[worker.slot.slot_id] = self._begin(worker.slot)

    def _reap(self, worker: Worker, events: list[Event]) -> None:
        """Read what a dead worker has still sent, end its descendants, and report how it ended."""
        worker.read(events, is_last=True)
        code = worker.process.wait()
        session = worker.process.pid
        processes.signal_group(session, processes.KILL)
        left = self._end_descendants(session)
        processes.reap_adopted([session])
        log_end = os.stat(worker.log).st_size
        is_no_doing = code == -processes.KILL and not worker.was_killed
        took = worker.took
        if worker.group is not None and is_no_doing:
            took = worker.group.took
        by_memory = Outcome.MEMORY_LIMIT if took else None
        # After a look: nobody knows what the task in hand has of it.
        if worker.took and worker.is_of_past:
            took, by_memory = f"was killed as the task before {took}", Outcome.LOST
        death = WorkerDied(
            worker.worker_id,
            code if code >= 0 else None,
            -code if code < 0 else None,
            took or worker.unfit or reason_of(code, left),
            "" if worker.unfit else log_tail(worker.log, worker.tasks_end),
            is_no_doing and worker.met_no_memory(),
            worker.tasks_end,
            log_end,
            outcome=by_memory,
        )
        self._forget(worker)
        if devices := worker.slot.devices:
            deadline_s = time.monotonic() + _RELEASE_S
            pids = (session, *left)
            self._releasing.append(_Release(death, pids, devices, deadline_s))
        else:
            events.append(death)

    def _await_memory(self, events: list[Event]) -> None:
        """A GPU is used again only when the driver shows the dead worker's memory as free."""
        waiting = []
        for release in self._releasing:
            held = self._assignment.held_mib(release.pids, release.devices)
            if not held:
                events.append(release.death)
            elif time.monotonic() > release.deadline_s:
                stuck = (
                    f"{held} MiB are still held by its dead worker (pid {release.pids[0]}); "
                    "a reset of the GPU or a reboot frees them"
                )
                events.append(release.death._replace(stuck=stuck))
            else:
                waiting.append(release)
        self._releasing = waiting

    def _end_descendants(self, session: int) -> list[int]:
        """Processes of this worker: same session, or adopted by us after it died."""
        if not processes.IS_LINUX:
            return []
        own = {worker.process.pid for worker in self._workers.values()} - {session}
        own |= {spare.process.pid for spare in self._spares.values()}
        return processes.end_orphans(self._mark, session, own)

    def _forget(self, worker: Worker) -> None:
        self._selector.unregister(worker.channel.socket)
        worker.channel.close()
        if worker.memory is not None:
            worker.memory.close()
        if worker.pidfd >= 0:
            self._selector.unregister(worker.pidfd)
            os.close(worker.pidfd)
        worker.process.wait()
        if worker.group is not None and self._groups is not None:
            self._groups.end(worker.group)
        del self._workers[worker.worker_id]

    def _housekeep(self) -> None:
        now = time.monotonic()
        if now - self._checked < _CHECK_EVERY_S:
            return
        self._checked = now
        for worker in self._workers.values():
            processes.reap_group(worker.process.pid)
            # A single task that prints without end must not fill the disk: its output is
            # appended, so cutting the file makes it go on at the cut.
            if os.stat(worker.log).st_size > max(_LOG_LIMIT, worker.tasks_end + _LOG_LIMIT):
                os.truncate(worker.log, worker.tasks_end + TRACE_BYTES)
