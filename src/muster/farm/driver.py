"""Who chooses tasks while a run goes on, such as a search: what it is asked, and what it is told.

A driver reads no clock that matters to its choices, and writes nothing: what it says is recorded by
the coordinator, in the transaction of what it was told, before any of it is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from muster.base.errors import MusterError
from muster.farm.events import Event, Logged
from muster.farm.ledger.queries import SearchRow
from muster.farm.ledger.store import Ledger, NewTask
from muster.farm.task import TaskState


class Proposed(NamedTuple):
    """A task to be run; ``what`` is the driver's own name for it.

    ``is_wanted``: False for one that was decided to end before it began.
    """

    task: NewTask
    what: Any
    is_wanted: bool = True


class Driver(Protocol):
    @property
    def num_expected(self) -> int:
        """How many tasks there will be in the end, as far as is known."""

    @property
    def problem(self) -> MusterError | None:
        """Why going on would be in vain, None while it would not. What runs may still change it."""

    def begin(self, ledger: Ledger) -> list[Event]:
        """Rebuild what was known from the ledger, inside a transaction; what is still to be done
        is returned."""

    def ask(self, count: int) -> list[Proposed]:
        """Up to ``count`` tasks to run next, each of which is answered with ``added``."""

    def added(self, what: Any, task_id: int) -> None:
        """The ledger has this task under this number."""

    def heard(self, logged: Logged) -> list[Event]:
        """A task has logged numbers; what is to be done is returned."""

    def ended(self, task_id: int, state: TaskState, value: bytes) -> list[Event]:
        """A task has ended; ``value``: its encoded result."""

    def last_of(self, task_id: int) -> bytes:
        """The last that a task has logged under each name, encoded like a result."""

    def take_records(self) -> Sequence[SearchRow]:
        """What is to be recorded since the last call."""

    def is_over(self) -> bool:
        """Whether it would propose nothing any more, unless something that runs changes that."""
