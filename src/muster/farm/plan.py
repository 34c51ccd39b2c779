"""What a run asks of the coordinator, the listing of its tasks, and how it has ended."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from muster.base.clock import Clock
from muster.farm.decisions import Policy
from muster.farm.events import Event
from muster.farm.ledger.store import Ledger
from muster.farm.task import HeldWorker, NewTask, SlotSpec, TargetSpec, TaskState
from muster.farm.view import RunView
from muster.run.folder import RunFolder
from muster.run.requests import Ask

if TYPE_CHECKING:
    from muster.farm.steering import Driver

#: From a target's name to its number in the ledger.
Numbers = Mapping[str, int]
#: Tasks listed per turn: few at first, so that the first task starts at once; then twice as many
#: each turn, and the more the more there are, because each commit waits for the disk and rewrites
#: pages all over the index of keys.
FIRST_CHUNK, _LARGE_CHUNK = 1000, 10_000
_LARGE_PLAN = 50_000
_CHUNKS_OF_LISTED = 20  # the next chunk is what is listed by this
#: But for no longer than this by the clock, looked at after each piece: results and the sign of
#: life that pilots wait for come after the turn, also where the processor is busy.
_MOST_S, _PIECE = 1.0, 1000
_ENQUEUED = "enqueued"  # in the ledger: the plan that it holds all tasks of


class Request(StrEnum):
    """What somebody outside asks of a running sweep."""

    DRAIN = "drain"
    STOP = "stop"
    CANCEL = "cancel"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is to be done. Tasks come lazily, so that a million of them need no memory."""

    folder: RunFolder
    targets: Mapping[int, TargetSpec]  # by the ledger's target id
    slots: tuple[SlotSpec, ...]
    policy: Policy
    total: int
    feed: Iterator[NewTask]
    is_distinct: bool = False  # no two of them are equal, which is known beforehand
    plan_id: str = ""
    held: Mapping[int, HeldWorker] = field(default_factory=dict)  # by slot: still at work
    code: str | None = None  # what workers that are started now run
    driver: Driver | None = None  # chooses further tasks while these run


class Beside(AbstractContextManager[object], Protocol):
    """What goes on beside the loop, and tells it what others want. It is entered for as long."""

    clock: Clock

    def show(self, view: RunView) -> None:
        """Be told how the work stands, ten times a second."""

    def requests(self) -> list[Request]:
        """What signals have asked for since the last turn. Called every turn, so it is cheap."""

    def asked(self) -> list[Ask]:
        """What others ask about single tasks, each to be answered."""

    def do(self, view: RunView) -> tuple[list[Event], list[Request]]:
        """Whatever has to be done twice a second: events for the scheduler, and requests."""


@dataclass
class Ending:
    """How the loop ended; the counts are the ledger's.

    ``interrupted``: it was asked to end and has left something undone. ``stop_signal``: the first
    signal that asked, also where nothing was left to do; 0 without one. ``is_lacking``: not all
    that was asked for has come of tasks that are done, as of a map with rejected records.
    """

    counts: dict[TaskState, int]
    paused: str = ""
    interrupted: bool = False
    stop_signal: int = 0
    cancelled: bool = False
    unusable: str = ""
    imbalance: str | None = None
    is_lacking: bool = False
    notes: list[tuple[str, str]] = field(default_factory=list)


class Listing:
    """Lists the tasks of a plan in the ledger, some in each turn, while it ``goes_on``."""

    def __init__(self, plan: Plan, ledger: Ledger) -> None:
        self._plan = plan
        self._ledger = ledger
        self._count = FIRST_CHUNK
        self._num_listed = 0
        # Whether all that is known of the ledger's tasks is that the plan begins with them.
        self._is_beginning = plan.is_distinct and plan.total >= _LARGE_PLAN
        self.goes_on = False
        self.go_on()

    def go_on(self) -> None:
        """List what is not listed yet; a search lists its tasks itself."""
        self.goes_on = self._plan.driver is None and not self.is_listed

    @property
    def is_listed(self) -> bool:
        """Whether the ledger holds every task of this plan."""
        return self._ledger.meta(_ENQUEUED) == self._plan.plan_id

    def add(
        self,
        is_asked: Callable[[], bool] = lambda: False,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> int:
        """List the next tasks, inside a transaction; how many of them are new.

        ``is_asked``: whether a signal has come, which ends the turn. ``meanwhile`` is called now
        and then where the last of them take long.
        """
        before, num_new = self._num_listed, 0
        end_s = time.monotonic() + _MOST_S
        while self.goes_on and self._num_listed - before < self._count:
            # Not the whole of what is listed in a turn: it would be the largest thing in memory.
            piece = list(itertools.islice(self._plan.feed, _PIECE))
            num_new += self._ledger.list_tasks(self._not_listed(piece))
            num_listed = len(piece)
            self._num_listed += num_listed
            if num_listed < _PIECE:
                self._ledger.index_keys(meanwhile)
                self.end()
            if time.monotonic() > end_s or is_asked():
                break
        many = self._num_listed // _CHUNKS_OF_LISTED
        self._count = max(min(2 * self._count, _LARGE_CHUNK), many)
        return num_new

    def _not_listed(self, piece: list[NewTask]) -> list[NewTask]:
        """Those of the next tasks that the ledger may lack.

        A new ledger is empty, and one in which a listing was stopped holds the beginning of the
        plan. Where that is so, which is seen key by key, it holds none of the rest, and a large
        rest is listed without the index of keys.
        """
        if not self._is_beginning:
            return piece
        known = self._ledger.keys_after(self._num_listed, len(piece))
        num_known = len(known)
        if known != [task.key for task in piece[:num_known]]:
            self._is_beginning = False
            return piece
        if num_known < len(piece):  # these are all that it holds
            self._is_beginning = False
            if self._plan.total - self._num_listed >= _LARGE_PLAN:
                self._ledger.forget_keys()
        return piece[num_known:]

    def end(self) -> None:
        """Note that there are no others."""
        self.goes_on = False
        self._ledger.set_meta(_ENQUEUED, self._plan.plan_id)


def imbalance_of_tasks(
    planned: int, counts: Mapping[TaskState, int], num_results: int
) -> str | None:
    """Say what is wrong, in a sentence without its full stop; None when the counts balance.

    ``planned``: tasks of the plan, 0 while they have not all been listed. There may be more of
    them than planned, from earlier seeds or divided tasks, and never fewer.
    """
    known, stopped = sum(counts.values()), counts.get(TaskState.STOPPED, 0)
    waiting = counts[TaskState.READY] + counts[TaskState.CLAIMED]
    if known < planned:
        parts = (
            f"{counts[TaskState.DONE]:,} done + {counts[TaskState.FAILED]:,} failed + "
            f"{counts[TaskState.CANCELLED]:,} cancelled + {waiting:,} waiting"
            + (f" + {stopped:,} stopped" if stopped else "")
        )
        return f"the plan has {planned:,} tasks, and the ledger knows {known:,} ({parts})"
    if counts[TaskState.DONE] + stopped != num_results:
        more = f" and {stopped:,} stopped" if stopped else ""
        return (
            f"{counts[TaskState.DONE]:,} tasks are done{more}, and the ledger holds "
            f"{num_results:,} results"
        )
    return None
