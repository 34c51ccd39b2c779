"""Workers that are forked from a process that was started ahead: the coordinator's end.

One command has one such process, from its first moment to its end. Where there is none, or where it
was killed, workers are started as processes of their own.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from muster.base import processes
from muster.base.processes import RUN_MARKER
from muster.base.settings import child_environment
from muster.farm.worker.forks import MESSAGE_BYTES, NO_MARK_YET

#: A process forks in milliseconds, unless it was stopped.
_ANSWER_S = 10.0


class ForkServerLost(ConnectionError):
    """It was killed while it forked, or cannot do it here: a worker may have come of it, which has
    that socket.
    """


class Forked:
    """A worker as `subprocess.Popen` has it: a child of this process, which a subreaper is."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def is_ours(self) -> bool:
        """Whether the kernel has made it a child of this process."""
        try:
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return False
        return True

    def poll(self) -> int | None:
        return self._collect(os.WNOHANG)

    def wait(self) -> int:
        code = self._collect(0)
        assert code is not None
        return code

    def _collect(self, how: int) -> int | None:
        if self._code is None:
            try:
                done, status = os.waitpid(self.pid, how)
            except ChildProcessError:  # somebody else has collected it: so does Popen then
                done, status = self.pid, 0
            if done:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code


class ForkServer:
    def __init__(self, modules: Sequence[str]) -> None:
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.settimeout(_ANSWER_S)
        try:
            self._process = self._begin(theirs, modules)
        except BaseException:
            self._connection.close()
            raise
        finally:
            theirs.close()

    def _begin(self, theirs: socket.socket, modules: Sequence[str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [
                *(sys.executable, "-m", "muster.farm.worker.main", "fork"),
                *(str(theirs.fileno()), str(os.getpid()), *modules),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
            env=child_environment({RUN_MARKER: NO_MARK_YET}),
        )

    def fork(
        self, theirs: socket.socket, log: int, lifeline: int, environment: Mapping[str, str]
    ) -> Forked | None:
        """A worker with these descriptors; None where it cannot be asked for one, and never can.

        Raises ForkServerLost.
        """
        message = json.dumps(dict(environment)).encode()
        if len(message) > MESSAGE_BYTES:
            return None
        try:
            socket.send_fds(self._connection, [message], [theirs.fileno(), log, lifeline])
        except OSError:
            return None
        try:
            answer = self._connection.recv(32)
        except OSError:
            answer = b""
        if not answer:
            raise ForkServerLost
        worker = Forked(int(answer))
        if not worker.is_ours():  # a sandbox without subreapers
            processes.send_signal(worker.pid, processes.KILL)
            raise ForkServerLost
        return worker

    def close(self) -> None:
        self._connection.close()
        self._process.kill()
        self._process.wait()


_server: ForkServer | None = None


@contextmanager
def started_ahead(*modules: str) -> Iterator[None]:
    """Have one that imports ``modules`` meanwhile, for the workers that are started inside."""
    global _server
    if sys.platform == "linux" and _server is None:
        with suppress(OSError):  # no room for a process: workers are started without it, or not
            _server = ForkServer(modules)
    try:
        yield
    finally:
        _forget()


def _forget() -> None:
    global _server
    if _server is not None:
        _server.close()
        _server = None


def fork_worker(
    theirs: socket.socket, log: int, lifeline: int, environment: Mapping[str, str]
) -> Forked | None:
    """A forked worker; None where there is nothing to fork it from. Raises ForkServerLost."""
    worker = None
    try:
        if _server is not None:
            worker = _server.fork(theirs, log, lifeline, environment)
    finally:
        if worker is None:
            _forget()
    return worker
