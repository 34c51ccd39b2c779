"""Works off what a run asks of the farm: opens the ledger, settles what earlier starts have left,
then lets the coordinator go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from muster.base.settings import Settings
from muster.devices.discovery import why_lost
from muster.devices.packing import MemorySampler
from muster.farm.coordinator import Coordinator
from muster.farm.decisions import Policy
from muster.farm.executors.base import Assignment, Executor, PilotLeft
from muster.farm.executors.cluster import ClusterRequest
from muster.farm.ledger.away import open_ledger
from muster.farm.ledger.store import Ledger, NewTask
from muster.farm.leftover import dismiss, settle
from muster.farm.plan import Ending, Hooks, Numbers, Plan
from muster.farm.steering import Driver
from muster.farm.task import SlotSpec, TargetSpec, TaskState
from muster.run.folder import RunFolder
from muster.run.record import own_id
from muster.run.session import Session


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a run asks of the farm.

    ``feed`` makes the tasks lazily; ``drive``, where there is one, makes what chooses them instead.
    ``reopens``: tasks in these states are tried again. ``has_pilots``: the executor goes on with
    those of an earlier start. ``cluster`` and ``python`` are for the executor.
    """

    folder: RunFolder
    settings: Settings
    targets: Sequence[TargetSpec]
    code_id: str
    plan_id: str
    total: int
    feed: Callable[[Numbers], Iterator[NewTask]]
    drive: Callable[[Numbers], Driver] | None
    policy: Policy
    slots: tuple[SlotSpec, ...]
    make_executor: Callable[[Assignment], Executor]
    reopens: tuple[TaskState, ...] = ()
    cluster: ClusterRequest = field(default_factory=ClusterRequest)
    has_pilots: bool = False
    python: Path | None = None


def work_off(
    work: Work,
    hooks: Hooks,
    session: Session,
    *,
    say: Callable[[str], None],
    beside: AbstractContextManager[object],
) -> Ending:
    """Work until nothing is left, or somebody wants it to end; ``beside`` is entered for as long.

    ``say`` gets a line where tasks of earlier starts run again.
    """
    with closing(open_ledger(work.folder, work.settings)) as ledger, beside:
        numbers = _number_targets(ledger, work)
        targets = {numbers[spec.name]: spec for spec in work.targets}
        left, num_again = _settle(ledger, work, targets)
        num_again += _open_stopped(ledger, work, numbers)
        if num_again:
            say(f"{num_again:,} task{'s' if num_again > 1 else ''} will run again")
        assignment = Assignment(
            folder=work.folder,
            run_id=own_id(work.folder).text,
            targets=targets,
            held_mib=MemorySampler(work.settings).used_by,
            why_lost=partial(why_lost, work.settings),
            cluster=work.cluster,
            left=left,
            python=work.python,
        )
        plan = Plan(
            folder=work.folder,
            targets=targets,
            slots=work.slots,
            policy=work.policy,
            total=0 if work.drive else work.total,
            feed=work.feed(numbers),
            driver=None if work.drive is None else work.drive(numbers),
            plan_id=work.plan_id,
            code=work.code_id or None,
            held={pilot.slot_id: pilot.worker for pilot in left if pilot.worker is not None},
        )
        labels = [slot.label for slot in plan.slots]
        journal = session.begin(tasks=work.total, workers=labels, code=plan.code)
        executor = work.make_executor(assignment)
        ending = Coordinator(plan, ledger, executor, journal, hooks).run()
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
