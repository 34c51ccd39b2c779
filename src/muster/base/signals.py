"""Signals of this process: who takes them, and what a request to end leads to.

===========================  =====================================================================
an ignored signal            stays ignored: ``nohup``, a shell's background job
where work can be saved      the first request saves and ends, the second ends at once
where results are written    the first one waits until they are, the second ends at once
anywhere else                ends at once, and takes back what was begun
===========================  =====================================================================

INT is the user's Ctrl-C. TERM, HUP and USR1 come from a system that may start the same command
again, so what is not finished then ends with 75 instead of 130.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from muster.base.errors import EXIT_INTERRUPTED, EXIT_REQUEUE

#: Requests to end.
ENDING = ("SIGINT", "SIGTERM", "SIGHUP")
#: What `sbatch --signal` is mostly told to send some time before the end of a job.
WARNING = "SIGUSR1"

#: What is noted in place of a signal where `muster cancel` asked.
CANCEL = "cancel"
_SHOWN = {
    CANCEL: "`muster cancel`",
    "SIGINT": "Ctrl-C (SIGINT)",
    "SIGHUP": "the hang-up of its terminal (SIGHUP)",
    WARNING: f"the warning before the end of its job ({WARNING})",
}

Handler = Callable[[int, FrameType | None], Any]


class Interrupted(KeyboardInterrupt):
    """A request to end, where there is nothing to save."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def stop_code(number: int) -> int:
    """The exit code of a command that this signal has ended, with work left that can go on."""
    return EXIT_INTERRUPTED if number in (0, signal.SIGINT) else EXIT_REQUEUE


def shown_request(name: str) -> str:
    """What asked for an end, for people; ``name``: that of a signal, or `CANCEL`.

    >>> shown_request("SIGINT"), shown_request("SIGTERM"), shown_request("cancel")
    ('Ctrl-C (SIGINT)', 'SIGTERM', '`muster cancel`')
    """
    return _SHOWN.get(name, name)


def stopped_by(number: int, *, is_cancelled: bool) -> str:
    """How an ending names what this signal was; "" for 0."""
    if not number:
        return ""
    return CANCEL if is_cancelled else signal.Signals(number).name


@contextmanager
def handled(
    names: Sequence[str], handler: Handler, *, always: Sequence[str] = ()
) -> Iterator[list[int]]:
    """A context in which ``handler`` has these signals, unless they are ignored.

    ``always``: also those of these names that are ignored, because our own launcher sends them.
    Yields the numbers that were taken: none outside of the main thread.
    """
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for name in dict.fromkeys((*names, *always)):
            number = getattr(signal, name, None)
            if number is None:
                continue  # not on this system
            if name in always or signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, handler)
    try:
        yield list(before)
    finally:
        for number, was in before.items():
            signal.signal(number, was)


class Requests:
    """The requests to end that this process has got, in their order.

    ``began_s``: Unix time, when the command or the call began; ``reason``: the first of all, or
    Ctrl-C if there was one, 0 before any; ``heard``: those that nobody has acted upon.
    """

    def __init__(self) -> None:
        self.began_s = time.time()
        self.reason = 0
        self.heard: list[int] = []
        self._asked: list[int] | None = None
        self._count = 0
        self._may_wait = False
        self._is_watched = False

    def note(self, number: int, frame: FrameType | None) -> None:
        is_end = number != getattr(signal, WARNING, 0)
        self.heard.append(number)
        self._count += is_end
        if not self.reason or number == signal.SIGINT:  # who presses it wants no new start
            self.reason = number
        if self._is_watched or (self._may_wait and (self._count < 2 or not is_end)):
            return
        raise Interrupted(number)

    def take(self) -> list[int]:
        """Those since the last call; who takes them acts upon them."""
        taken, self.heard = self.heard, []
        return taken

    def ask(self, number: int) -> bool:
        """Note a request of our own; False where there is one already, which it would make more
        urgent, or where nobody takes them. Other threads may call it."""
        if self.reason or not self._is_watched:
            return False
        self._asked = self.heard  # whoever takes it leaves another list
        self.note(number, None)
        return True

    @property
    def is_taken(self) -> bool:
        """Whether somebody acts upon what `ask` has noted."""
        return self._asked is not self.heard

    def withdraw(self) -> None:
        """Take back what `ask` has noted where nobody has taken it."""
        if self._asked is self.heard and self.heard:
            number = self.heard.pop(0)
            self._count -= 1
            if self.reason == number:
                self.reason = self.heard[0] if self.heard else 0
        self._asked = None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """A context in which somebody takes them all the time."""
        before, self._is_watched = self._is_watched, True
        try:
            yield
        finally:
            self._is_watched = before

    @contextmanager
    def waiting(self, *, may_wait: bool) -> Iterator[None]:
        before, self._may_wait = self._may_wait, may_wait
        try:
            yield
        finally:
            self._may_wait = before


_current: list[Requests] = []


@contextmanager
def listening(*, may_wait: bool = True) -> Iterator[Requests]:
    """A context in which requests to end are noted; inside another one it is the same Requests.

    ``may_wait``: the first one is only noted, because what is going on ends by itself or will
    look at it; otherwise it raises Interrupted. What nobody has acted upon when the outermost
    context ends is the caller's, unless that is ours (``may_wait`` is False there).
    """
    if threading.current_thread() is not threading.main_thread():
        yield Requests()
        return
    if _current:
        with _current[-1].waiting(may_wait=may_wait):
            yield _current[-1]
        return
    requests = Requests()
    _current.append(requests)
    # A caller's own handler for the warning is for the caller's own purposes.
    is_free = signal.getsignal(getattr(signal, WARNING, signal.SIGTERM)) is signal.SIG_DFL
    names = (*ENDING, WARNING) if is_free else ENDING
    try:
        with requests.waiting(may_wait=may_wait), handled(names, requests.note):
            yield requests
    finally:
        _current.pop()
    if may_wait and requests.heard:
        signal.raise_signal(requests.heard[0])
