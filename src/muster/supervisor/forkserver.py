"""The fork server: a process that has imported everything once and is then forked into ranks.

It is forked from the supervisor before that has any thread, imports what the ranks will need, and
touches no GPU: a forked process can use neither CUDA that its parent has initialised nor its
parent's threads. ``ForkServer`` is the supervisor's end, ``serve`` the other one.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muster.base.reaper import die_with_parent
from muster.base.settings import replace_environment, usable_cpu_count

_LEFT_TO_RANKS = tuple(
    getattr(signal, name)
    for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1")
    if hasattr(signal, name)
)
#: Imported once here instead of once by every rank.
_PRELOADED = ("torch.distributed", "torch.nn.parallel", "torch.utils.data")
#: The first optimizer loads it, which takes as long as torch itself. An entry is a training and
#: needs it; a script may not. With a core for each, ranks load it side by side and nobody waits.
_LATER = "torch._dynamo"


@dataclass
class Child:
    """A forked rank as the supervisor sees it; ``code``: minus the signal that killed it."""

    pid: int
    code: int | None = None

    def poll(self) -> int | None:
        """As of a process of `subprocess`, by what the fork server has said last."""
        return self.code


class ForkServer:
    """The supervisor's end: asks for ranks and hears how they ended."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lines = _Lines(connection)
        self._children: dict[int, Child] = {}
        self._is_lost = False

    def prepare(self, entry: str | None, num_ranks: int) -> str:
        """Import the entry's module there; returns why ranks must not be forked, or ""."""
        is_crowded = 2 * num_ranks > usable_cpu_count()
        later = [_LATER] if entry is not None and is_crowded else []
        self._send({"prepare": entry, "modules": later})
        while True:
            for message in self._lines.receive(block=True):
                if "prepared" in message:
                    return str(message["prepared"])
            if self._lines.is_closed:
                return "the process that was to be forked has died"

    def fork(self, argv: list[str], environment: Mapping[str, str], log: Path) -> Child:
        self._send({"argv": argv, "environment": dict(environment), "log": str(log)})
        while True:
            for message in self._lines.receive(block=True):
                if "forked" in message:
                    child = Child(message["forked"])
                    self._children[child.pid] = child
                    return child
                self._note(message)
            if self._lines.is_closed:
                raise ConnectionError("The process that ranks are forked from has died.")

    def poll(self) -> None:
        """Take in how ranks ended; all have, once the process that they were forked from has."""
        for message in self._lines.receive(block=False):
            self._note(message)
        if self._lines.is_closed:
            for child in self._children.values():
                child.code = -signal.SIGKILL if child.code is None else child.code

    def close(self) -> None:
        self._connection.close()

    def _note(self, message: dict[str, Any]) -> None:
        if "ended" in message and message["ended"] in self._children:
            self._children[message["ended"]].code = message["code"]

    def _send(self, message: dict[str, Any]) -> None:
        self._connection.sendall(json.dumps(message).encode() + b"\n")


def serve(connection: socket.socket, supervisor_pid: int) -> list[str] | None:
    """Fork ranks until the supervisor closes the connection.

    Returns None in the fork server itself at the end, and in each forked rank the arguments for
    ``muster.gang.rank.become_and_leave``, which the caller then calls.
    """
    die_with_parent(supervisor_pid)
    woken, wake = socket.socketpair()
    for end in (woken, wake):
        end.setblocking(False)
    # The end of a rank has to wake `select`. Python writes to the wake-up descriptor only for
    # signals that have a handler of its own, so there is one, which does nothing.
    signal.signal(signal.SIGCHLD, lambda *_: None)
    # A batch system signals every process of a job. The ranks then save and end; their parent must
    # outlive them, for they die with it. It ends when the supervisor closes the connection.
    for number in _LEFT_TO_RANKS:
        signal.signal(number, signal.SIG_IGN)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    for name in _PRELOADED:
        importlib.import_module(name)
    lines = _Lines(connection)
    selector = selectors.DefaultSelector()
    selector.register(connection, selectors.EVENT_READ)
    selector.register(woken, selectors.EVENT_READ)
    children: set[int] = set()
    while not lines.is_closed:
        selector.select()
        with contextlib.suppress(BlockingIOError):
            woken.recv(4096)
        _report_ends(connection, children)
        for message in lines.receive(block=False):
            if "prepare" in message:
                _answer(connection, {"prepared": _prepare(message["prepare"], message["modules"])})
                continue
            server_pid = os.getpid()
            pid = os.fork()
            if pid == 0:
                for item in (selector, connection, woken, wake):
                    item.close()
                return _become_rank(message, server_pid)
            children.add(pid)
            _answer(connection, {"forked": pid})
    return None


def _prepare(entry: str | None, modules: list[str]) -> str:
    """Import what the ranks will call; says why they cannot be forked after it, or ""."""
    if entry:
        sys.path.insert(0, str(Path.cwd()))
        modules = [*modules, entry.partition(":")[0]]
    with contextlib.suppress(Exception):  # each rank will meet the error, with its traceback
        for name in modules:
            importlib.import_module(name)
    gc.freeze()  # a collection in a rank would copy the pages of everything imported
    gc.enable()
    torch = sys.modules["torch"]
    if torch.cuda.is_initialized() or _spoils_forks(torch):
        return f"importing {entry} has initialised CUDA"
    if sys.platform == "linux" and (extra := len(os.listdir("/proc/self/task")) - 1):
        return f"importing {entry or 'torch'} has started {extra} threads"
    return ""


def _spoils_forks(torch: Any) -> bool:
    """Whether forked processes could not use CUDA any more; a forked child tries it.

    So it is even after torch has only counted GPUs, of which this process shows no trace.
    """
    pid = os.fork()
    if pid == 0:
        os._exit(int(torch.cuda._is_in_bad_fork()))
    return os.waitpid(pid, 0)[1] != 0


def _become_rank(message: dict[str, Any], server_pid: int) -> list[str]:
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, *_LEFT_TO_RANKS):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.setsid()
    die_with_parent(server_pid)
    log = os.open(message["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, write_through=True)  # type: ignore[union-attr]
    replace_environment(message["environment"])
    threads = int(message["environment"].get("OMP_NUM_THREADS", "0"))
    if threads:
        sys.modules["torch"].set_num_threads(threads)
    if "numpy.random" in sys.modules:  # Python seeds its own after a fork, numpy does not
        sys.modules["numpy.random"].seed()
    argv: list[str] = message["argv"]
    return argv


def _report_ends(connection: socket.socket, children: set[int]) -> None:
    for pid in list(children):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            children.discard(pid)
            _answer(connection, {"ended": pid, "code": os.waitstatus_to_exitcode(status)})


def _answer(connection: socket.socket, message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # the supervisor is gone, and this process ends with it
        connection.sendall(json.dumps(message).encode() + b"\n")


class _Lines:
    """JSON lines from a socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._rest = b""
        self.is_closed = False

    def receive(self, *, block: bool) -> list[dict[str, Any]]:
        try:
            data = self._connection.recv(1 << 16, 0 if block else socket.MSG_DONTWAIT)
        except (BlockingIOError, InterruptedError):
            return []
        except OSError:
            data = b""
        if not data:
            self.is_closed = True
            return []
        *whole, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in whole]
