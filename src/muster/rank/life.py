"""How a rank's program ends, left where the launcher finds it."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Literal, NamedTuple, Self

from muster.base.atomic_files import disk_error, explain_os_error
from muster.base.codec import write_json
from muster.base.errors import EXIT_REQUEUE, MusterError
from muster.base.signals import ENDING, handled
from muster.rank.process_group import Gang
from muster.run.folder import RunFolder


class Ending(NamedTuple):
    """``finished``: the training is over; ``requeue``: it was asked to stop and has saved."""

    kind: Literal["finished", "requeue"]
    why: str


class StartAgain(MusterError):
    """Not an end: the launcher starts the gang again."""


@contextmanager
def refusals_told(folder: RunFolder) -> Iterator[None]:
    """A user's mistake goes to where the launcher finds it, without a traceback."""
    try:
        yield
    except MusterError as error:
        _tell(folder, error)
        raise SystemExit(error.exit_code) from None
    except Exception as error:
        found = disk_error(error)
        if found is None:
            raise
        place = Path(found.filename) if isinstance(found.filename, str) else folder.path
        explained = explain_os_error(found, "write", place)
        _tell(folder, explained)
        raise SystemExit(explained.exit_code) from error


def _tell(folder: RunFolder, error: MusterError) -> None:
    kind = "restart" if isinstance(error, StartAgain) else "refused"
    word = {"message": str(error), "exit_code": error.exit_code}
    with suppress(OSError):  # the disk may be too full even for this
        write_json(folder.ending_json, {"ending": kind, **word})


def leave_word(folder: RunFolder, gang: Gang, step: int, total_steps: int | None = None) -> None:
    """Tell the launcher that this was no failure and no end: the same command goes on."""
    if gang.is_first:
        word = {"ending": "requeue", "step": step, "total_steps": total_steps}
        write_json(folder.ending_json, {**word, "exit": EXIT_REQUEUE})
    gang.council.meet()


def tell_finished(folder: RunFolder, gang: Gang) -> None:
    """Everything is written: a signal that comes from now on has nothing to interrupt."""
    if gang.is_first:
        write_json(folder.ending_json, {"ending": "finished"})


def forget_word(folder: RunFolder, gang: Gang) -> None:
    """The word of a start that was ended and started again is not this one's."""
    if gang.is_first:
        folder.ending_json.unlink(missing_ok=True)


#: A batch system signals all processes, and the launcher passes the same signal on.
_ECHO_S = 3.0


class StopFlag:
    """A context: inside it SIGTERM, SIGUSR1, SIGINT and SIGHUP ask for a stop at the next step.

    So does ``is_cancelled``, which is asked at every step.
    """

    def __init__(self, is_cancelled: Callable[[], bool] = lambda: False) -> None:
        self.name = ""
        self._is_set = False
        self._is_cancelled = is_cancelled
        self._since_s = 0.0
        self._context = ExitStack()

    def __enter__(self) -> Self:
        # TERM and USR1 come from our launcher, whatever its own caller has ignored.
        taken = handled(ENDING, self._on_signal, always=("SIGTERM", "SIGUSR1"))
        self._context.enter_context(taken)
        return self

    def __exit__(self, *_: object) -> None:
        self._context.close()

    @property
    def is_set(self) -> bool:
        if not self._is_set and self._is_cancelled():
            self._is_set, self.name = True, "muster cancel"
        return self._is_set

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if self._is_set:
            if number != getattr(signal, "SIGUSR1", None) and now_s - self._since_s > _ECHO_S:
                os._exit(128 + number)
            return
        self._is_set, self._since_s = True, now_s
        self.name = signal.Signals(number).name


class Interval:
    """When a checkpoint is due: every so many seconds (as rank 0 counts) or steps."""

    def __init__(self, *, seconds: float | None, steps: int | None, is_first: bool) -> None:
        self._seconds = seconds if is_first else None
        self._steps = steps
        self._due_s = math.inf if self._seconds is None else time.monotonic() + self._seconds

    def is_due(self) -> bool:
        """By the clock; only ever true on rank 0, whose clock counts for all."""
        return time.monotonic() >= self._due_s

    def is_due_at(self, step: int) -> bool:
        return self._steps is not None and step % self._steps == 0

    def done(self) -> None:
        if self._seconds is not None:
            self._due_s = time.monotonic() + self._seconds
