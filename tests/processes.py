"""Processes of tests: commands that are started and go on, and what is asked of processes that may
end meanwhile.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from muster.base.settings import child_environment

_SOURCE = Path(__file__).parents[1] / "src"
_LIMIT_S = 300.0


class Commands:
    """A folder in which commands are started; a context that leaves none of them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._started: list[subprocess.Popen[bytes]] = []

    def begin(self, *words: str) -> subprocess.Popen[bytes]:
        """Start ``muster WORDS``, which is not waited for."""
        with (self.path / "said.txt").open("ab") as said:
            process = subprocess.Popen(
                [sys.executable, "-m", "muster", *words],
                cwd=self.path, stdin=subprocess.DEVNULL, stdout=said, stderr=said,
            )  # fmt: skip
        self._started.append(process)
        return process

    @property
    def said(self) -> str:
        """What all of them have printed."""
        path = self.path / "said.txt"
        return path.read_text() if path.exists() else ""

    def until(self, ready: Callable[[], object]) -> None:
        deadline = time.monotonic() + _LIMIT_S
        while not ready():
            assert time.monotonic() < deadline, f"it did not happen in time: {self.said}"
            time.sleep(0.02)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self._started:
            process.kill()
            process.wait()


@contextmanager
def at_work(code: str, *words: str) -> Iterator[tuple[int, int]]:
    """A process that runs ``code`` until the end of the context. It prints the pid of its child, or
    0 or less where it has none, once it has begun; both pids are returned."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *words],
        stdout=subprocess.PIPE, text=True, env=child_environment({"PYTHONPATH": str(_SOURCE)}),
    )  # fmt: skip
    child = 0
    try:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        yield process.pid, child
    finally:
        process.kill()
        process.communicate()
        if child > 0:
            os.kill(child, signal.SIGKILL)


def is_gone(pid: int) -> bool:
    """True for a process that has ended, whether or not its parent has collected it."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def command_line(process: psutil.Process) -> str:
    """The words a process was started with; empty for one that has just ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # also raised, as a subclass, for a zombie
        return ""


def name_of(process: psutil.Process) -> str:
    """Its short name; empty for one that has just ended."""
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""


def ports_of(process: psutil.Process) -> set[int]:
    """Where it listens; nowhere, if it has just ended."""
    try:
        return {one.laddr.port for one in process.net_connections("tcp") if one.status == "LISTEN"}
    except psutil.NoSuchProcess:
        return set()


def lives(process: psutil.Process) -> bool:
    """False also for one that has ended and was not collected."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
