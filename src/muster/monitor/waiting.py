"""Waiting for a time, a signal or the end of a child, whichever comes first."""

from __future__ import annotations

import os
import select
import signal
import socket
from contextlib import ExitStack, suppress
from types import FrameType
from typing import Self

from muster.base.signals import handled

#: What a command may want to hear although we do not.
PASSED_ON = ("SIGQUIT", "SIGUSR1", "SIGUSR2")
#: Ctrl-C and Ctrl-\.
TYPED = ("SIGINT", "SIGQUIT")


class Waiter:
    """A context for the main thread: signals become numbers in ``heard``, in their order.

    Nothing is lost between looking and waiting: Python writes a byte into a socket for each
    signal, and waiting is for that socket.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self.heard: list[int] = []
        self._names = names
        self._context = ExitStack()
        self._ours, self._theirs = socket.socketpair()

    def __enter__(self) -> Self:
        for end in (self._ours, self._theirs):
            end.setblocking(False)
        self._descriptor = signal.set_wakeup_fd(self._theirs.fileno(), warn_on_full_buffer=False)
        self._context.enter_context(handled(self._names, self._note))
        child = handled((), lambda number, frame: None, always=("SIGCHLD",))
        self._context.enter_context(child)
        return self

    def __exit__(self, *_: object) -> None:
        self._context.close()
        signal.set_wakeup_fd(self._descriptor)
        self._ours.close()
        self._theirs.close()

    def wait(self, seconds: float) -> None:
        """Return after ``seconds``, or sooner when there was a signal or a child has ended."""
        readable, _, _ = select.select([self._ours], [], [], max(0.0, seconds))
        if readable:
            with suppress(BlockingIOError):
                self._ours.recv(4096)

    def take(self) -> list[int]:
        """The signals since the last call."""
        heard, self.heard = self.heard, []
        return heard

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.heard.append(number)


def is_at_terminal() -> bool:
    """Whether this process belongs to the foreground group of a terminal.

    A Ctrl-C or Ctrl-\\ that is typed there, and the hang-up when it closes, go to the whole group
    and so to our children as well. Such a signal that was sent to us alone cannot be told apart.
    """
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | getattr(os, "O_NOCTTY", 0))
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)
