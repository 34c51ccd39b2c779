"""Works off what a run asks of the farm: opens the ledger, settles what earlier starts have left,
then lets the coordinator go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from muster.base.settings import Settings
from muster.base.shown_text import count
from muster.devices.discovery import why_lost
from muster.devices.packing import MemorySampler
from muster.farm import wire
from muster.farm.coordinator import Coordinator
from muster.farm.decisions import Policy
from muster.farm.events import Divided, Logged, Results, Returned, WorkerDied, WorkerReady
from muster.farm.executors import remote
from muster.farm.executors.base import Assignment, Executor, PilotLeft
from muster.farm.executors.cluster import ClusterRequest
from muster.farm.executors.mailbox import (
    BYE,
    HELLO,
    LEAVING,
    Heartbeat,
    PilotBox,
    Reader,
    all_boxes,
    has_assigned,
    read_heartbeat,
    write_heartbeat,
)
from muster.farm.executors.remote import EventReader, Frame
from muster.farm.ledger.away import open_ledger
from muster.farm.ledger.store import Ledger
from muster.farm.plan import Beside, Ending, Numbers, Plan
from muster.farm.results import publish, store_value
from muster.farm.steering import Driver
from muster.farm.task import (
    AttemptRecord,
    HeldWorker,
    NewTask,
    Outcome,
    SlotSpec,
    TargetSpec,
    Task,
    TaskState,
)
from muster.run.folder import RunFolder
from muster.run.session import Session

if TYPE_CHECKING:
    from muster.farm.executors.head_start import HeadStart


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a run asks of the farm.

    ``feed`` makes the tasks lazily, no two of them equal where it ``is_distinct``; ``drive``, where
    there is one, makes what chooses them instead. ``reopens``: tasks in these states are tried
    again. ``has_pilots``: the executor goes on with those of an earlier start. The others are for
    the executor.
    """

    folder: RunFolder
    settings: Settings
    targets: Sequence[TargetSpec]
    code_id: str
    plan_id: str
    total: int
    feed: Callable[[Numbers], Iterator[NewTask]]
    is_distinct: bool
    drive: Callable[[Numbers], Driver] | None
    policy: Policy
    slots: tuple[SlotSpec, ...]
    make_executor: Callable[[Assignment], Executor]
    reopens: tuple[TaskState, ...] = ()
    cluster: ClusterRequest = field(default_factory=ClusterRequest)
    has_pilots: bool = False
    python: Path | None = None
    head_start: HeadStart | None = None


def work_off(work: Work, beside: Beside, session: Session, *, say: Callable[[str], None]) -> Ending:
    """Work until nothing is left, or somebody wants it to end.

    ``say`` gets a line where tasks of earlier starts run again.
    """
    with closing(open_ledger(work.folder, work.settings)) as ledger, beside:
        numbers = _number_targets(ledger, work)
        targets = {numbers[spec.name]: spec for spec in work.targets}
        left, num_again = _settle(ledger, work, targets)
        num_again += _open_stopped(ledger, work, numbers)
        if num_again:
            say(f"{count(num_again, 'task')} will run again")
        assignment = Assignment(
            folder=work.folder,
            run_id=session.folder_id.text,
            targets=targets,
            held_mib=MemorySampler(work.settings).used_by,
            why_lost=partial(why_lost, work.settings),
            cluster=work.cluster,
            left=left,
            python=work.python,
            head_start=work.head_start,
        )
        plan = Plan(
            folder=work.folder,
            targets=targets,
            slots=work.slots,
            policy=work.policy,
            total=0 if work.drive else work.total,
            feed=work.feed(numbers),
            is_distinct=work.is_distinct,
            driver=None if work.drive is None else work.drive(numbers),
            plan_id=work.plan_id,
            code=work.code_id or None,
            held={pilot.slot_id: pilot.worker for pilot in left if pilot.worker is not None},
        )
        labels = [slot.label for slot in plan.slots]
        journal = session.begin(tasks=work.total, workers=labels, code=plan.code)
        executor = work.make_executor(assignment)
        ending = Coordinator(plan, ledger, executor, journal, beside).run()
        session.end(**{state.name.lower(): n for state, n in ending.counts.items()})
        return ending


def _number_targets(ledger: Ledger, work: Work) -> dict[str, int]:
    """The number of each target in the ledger, by its name; the ledger notes their code too."""
    ledger.begin()
    numbers = {spec.name: ledger.target_id(spec.name) for spec in work.targets}
    for number in numbers.values():
        ledger.record_code(number, work.code_id)
    ledger.commit()
    return numbers


def _settle(
    ledger: Ledger, work: Work, targets: Mapping[int, TargetSpec]
) -> tuple[list[PilotLeft], int]:
    """Void what a dead coordinator had claimed, except what its pilots have done or still do.

    Returns those pilots, and how many tasks are tried again.
    """
    request = work.cluster if work.has_pilots else None
    ledger.begin()
    left = settle(work.folder, ledger, request, targets)
    num_again = ledger.reopen(work.reopens) if work.reopens else 0
    ledger.commit()
    if request is None:
        dismiss(work.folder)
    return left, num_again


def _open_stopped(ledger: Ledger, work: Work, numbers: Numbers) -> int:
    """Tasks that a search has ended early and that a grid names are done after all; how many."""
    stopped = {} if work.drive is not None else ledger.stopped()
    if not stopped:
        return 0
    named = [stopped[task.key] for task in work.feed(numbers) if task.key in stopped]
    ledger.begin()
    ledger.reopen_stopped(named)
    ledger.commit()
    return len(named)


# ------------------------------------------------------- what a coordinator that is gone has left

# Its pilots go on without it. What they have finished is in their outboxes; what they still hold is
# what their inboxes gave them and their outboxes have not answered. Both are read before the claims
# of the old coordinator are voided, so nothing that was done is done again.


class Leftover(NamedTuple):
    """What the mailboxes of a run hold.

    ``finished``: attempts, each with its worker; ``logged``: all numbers of the run, most of them
    recorded long ago; ``pilots``: the last of each slot, if it may be alive.
    """

    finished: Sequence[tuple[int, Any]]
    logged: Sequence[Logged]
    pilots: Sequence[PilotLeft]


def settle(
    folder: RunFolder,
    ledger: Ledger,
    request: ClusterRequest | None,
    targets: Mapping[int, TargetSpec],
) -> list[PilotLeft]:
    """Record what waits in the outboxes, void the old coordinator's other claims, and return the
    pilots to go on with. Call it inside a transaction of the ledger.

    ``request``: what is asked of the cluster now; None when this run goes on elsewhere. Pilots
    that were asked for with other resources or another target are not gone on with.
    """
    left = survey(folder)
    if left.logged:
        ledger.record_metrics([(e.task_id, e.token, e.serial, e.body) for e in left.logged])
    _use_up_tokens(folder, ledger, left)
    records = [AttemptRecord(f.task_id, f.token, worker, f) for worker, f in left.finished]
    known = ledger.still_claimed([(r.task_id, r.token) for r in records])
    waiting = {(r.task_id, r.token): r for r in records if (r.task_id, r.token) in known}
    accepted = list(waiting.values())
    values = [store_value(folder, _key(ledger, r), r.finished.value) for r in accepted]
    ledger.record_waiting(accepted, values)
    for record in accepted:
        publish(folder, _key(ledger, record), record.token)
    if request is None or not has_assigned(folder, request.needs_of_pilots(targets)):
        ledger.recover()
        return []
    pilots = [pilot for pilot in left.pilots if pilot.slot_id < request.num_workers]
    claims = [(t.task_id, t.token) for p in pilots if p.worker for t in p.worker.tasks]
    kept = ledger.still_claimed(claims)
    ledger.recover(kept=kept)
    return [_still_wanted(pilot, kept) for pilot in pilots]


def dismiss(folder: RunFolder) -> None:
    """Tell pilots that may be alive to end: the run goes on without them."""
    heartbeat = read_heartbeat(folder)
    if heartbeat.session and not heartbeat.is_closed:
        write_heartbeat(folder, Heartbeat(heartbeat.session + 1, 0, is_closed=True))


def survey(folder: RunFolder) -> Leftover:
    """Read all mailboxes of the run; changes nothing."""
    finished: list[tuple[int, Any]] = []
    logged: list[Logged] = []
    last: dict[int, PilotLeft] = {}
    for box in all_boxes(folder):
        account = _Account()
        account.read_orders(box)
        outbox = Reader(box.outbox)
        account.read_answers(outbox.receive())
        finished += account.trusted()
        logged += account.logged
        last.pop(box.slot_id, None)
        if not account.is_over:
            heard = outbox.offset - account.unfinished_bytes
            last[box.slot_id] = PilotLeft(
                box.slot_id, box.job_id, box.restart, heard, *account.worker()
            )
    return Leftover(finished, logged, list(last.values()))


def _use_up_tokens(folder: RunFolder, ledger: Ledger, left: Leftover) -> None:
    """Have no attempt get the token of one that has logged numbers.

    A ledger that lives elsewhere does not bring claims home: after one was lost with its host, the
    numbers of the next attempt would pass for those of the lost one.
    """
    for task_id, token in {(event.task_id, event.token) for event in left.logged}:
        ledger.use_up_token(task_id, token)
    for path in folder.points.glob("*.jsonl"):
        key, _, number = path.stem.rpartition(".")
        with suppress(ValueError):  # a name that is not ours
            found = ledger.task_of_key(bytes.fromhex(key))
            if found is not None:
                ledger.use_up_token(found[0].task_id, int(number))


def _key(ledger: Ledger, record: AttemptRecord) -> str:
    return ledger.key_of(record.task_id).hex()


def _still_wanted(pilot: PilotLeft, kept: set[tuple[int, int]]) -> PilotLeft:
    """The pilot, without its worker where that holds a task that another has claimed since."""
    worker = pilot.worker
    if worker is None or all((t.task_id, t.token) in kept for t in worker.tasks):
        return pilot
    return pilot._replace(worker=None, unwanted=worker.worker_id)


class _Account:
    """What one pilot was given and what it has answered."""

    def __init__(self) -> None:
        self.is_over = False
        self.logged: list[Logged] = []
        self.unfinished_bytes = 0  # at the end: of an event whose other frames are not there yet
        self._is_leaving = False
        self._orders = _Orders()
        self._finished: list[tuple[int, Any]] = []
        self._ready: set[int] = set()
        self._dead: set[int] = set()
        self._divided: set[tuple[int, int]] = set()

    def read_orders(self, box: PilotBox) -> None:
        for _, path in box.inboxes():
            remote.CommandReader(self._orders).apply(Reader(path).receive())

    def read_answers(self, frames: Sequence[Frame]) -> None:
        events = EventReader()
        for header, body in frames:
            self.unfinished_bytes += len(wire.pack(header, body))
            if header[0] in (HELLO, LEAVING, BYE):
                self.is_over |= header[0] == BYE
                self._is_leaving |= header[0] == LEAVING
                self.unfinished_bytes = 0
                continue
            for event in events.read([(header, body)]):
                self.unfinished_bytes = 0
                self._answer(event)

    def _answer(self, event: object) -> None:
        held = self._orders.held
        match event:
            case Results(worker_id, finished):
                for item in finished:
                    self._finished.append((worker_id, item))
                    held.get(worker_id, {}).pop(item.task_id, None)
            case Returned(worker_id, task_ids):
                for task_id in task_ids:
                    held.get(worker_id, {}).pop(task_id, None)
            case Divided(task_id=task_id, token=token, given=given) if given:
                self._divided.add((task_id, token))
            case Logged():
                self.logged.append(event)
            case WorkerReady(worker_id):
                self._ready.add(worker_id)
            case WorkerDied():
                self._dead.add(event.worker_id)

    def trusted(self) -> list[tuple[int, Any]]:
        """The results that can be recorded as they are.

        Not those of a task that gave a part of itself away: whether the old coordinator has
        recorded the parts is not known here. It runs again, with what the ledger says it is.
        """
        return [
            (worker_id, item)
            for worker_id, item in self._finished
            if item.outcome is Outcome.OK and (item.task_id, item.token) not in self._divided
        ]

    def worker(self) -> tuple[HeldWorker | None, int | None]:
        """The worker to go on with, or the number of one that must be ended."""
        alive = [w for w in self._orders.started if w not in self._dead]
        if not alive:
            return None, None
        worker_id = alive[-1]
        tasks = list(self._orders.held[worker_id].values())
        if any((task.task_id, task.token) in self._divided for task in tasks):
            return None, worker_id
        held = HeldWorker(
            worker_id,
            tasks,
            is_together=bool(tasks) and worker_id in self._orders.together,
            is_ready=worker_id in self._ready,
            is_ending=self._is_leaving or worker_id in self._orders.ending,
        )
        return held, None


class _Orders:
    """Takes commands as an executor does, and only remembers them."""

    def __init__(self) -> None:
        self.started: list[int] = []
        self.held: dict[int, dict[int, Task]] = {}
        self.together: set[int] = set()  # whose last call was a joint one
        self.ending: set[int] = set()

    def start(self, worker_id: int, slot: SlotSpec) -> str:
        self.started.append(worker_id)
        self.held[worker_id] = {}
        return ""

    def send(self, worker_id: int, tasks: Sequence[Task], *, together: bool) -> None:
        self.held[worker_id].update((task.task_id, task) for task in tasks)
        (self.together.add if together else self.together.discard)(worker_id)

    def share(self, worker_id: int, task_id: int, others: int) -> None:
        return

    def stop_task(self, worker_id: int, task_id: int, *, pauses: bool) -> None:
        return

    def revoke(self, worker_id: int) -> None:
        return

    def confirm(self, worker_id: int, serial: int) -> None:
        return

    def end(self, worker_id: int, *, kill: bool) -> None:
        self.ending.add(worker_id)
