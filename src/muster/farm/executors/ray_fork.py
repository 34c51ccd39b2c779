"""Ray's workers on a host, forked from a process that has imported Ray.

Ray starts each worker as two programs in turn, which both import Ray: one for a runtime
environment, of which a run has none, and the worker itself. Here its node is told to start this
file instead. It hands over, through a socket, what it was started with to a process that has all
imports behind it and no thread, and ends; that one forks the worker. Where there is nobody to hand
it over to, this becomes what Ray meant to start.

    python -I -S ray_fork.py SOCKET PYTHON SETUP_WORKER DEFAULT_WORKER …
"""

from __future__ import annotations

import gc
import os
import socket
import sys

TYPE_CHECKING = False  # typing takes longer to import than all the rest
if TYPE_CHECKING:
    from collections.abc import Sequence

#: Flags of the first of the two programs.
_OF_SETUP = ("--language=", "--serialized-runtime-env-context=")
_ANSWER_S = 20.0
_LOOK_S = 1.0
_AT_ONCE_S = 3.0
_MOST_BYTES = 1 << 20
_SPLIT = "\0"


def main(words: list[str]) -> int:
    """What Ray starts in the place of a worker."""
    place, command = words[0], words[1:]
    if not hand_over(place, command):
        os.execv(command[0], command)
    return 0


def hand_over(place: str, command: list[str]) -> bool:
    """Have the worker forked. False: nobody was there to do it, or it needs an environment."""
    _, _, worker, *flags = command
    if any(flag.startswith(_OF_SETUP[1]) and flag[len(_OF_SETUP[1]) :] != "{}" for flag in flags):
        return False
    kept = [flag for flag in flags if not flag.startswith(_OF_SETUP)]
    told = [
        os.getcwd(), str(len(kept) + 1), worker, *kept,
        *(f"{name}={value}" for name, value in os.environ.items()),
    ]  # fmt: skip
    data = _SPLIT.join(told).encode(errors="surrogateescape")
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
            line.settimeout(_ANSWER_S)
            line.connect(place)
            socket.send_fds(line, [data], [0, 1, 2])
            return bool(line.recv(1))
    except OSError:
        return False


class Forks:
    """The process that forks workers: it lives from construction until this one ends.

    Make it before there is a thread: what is forked has only the one that forks.
    """

    def __init__(self, place: str, modules: Sequence[str]) -> None:
        self.place = place
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._server.bind(place)
        self._server.listen(128)
        parent = os.getpid()
        gc.freeze()  # what is there already is not looked through again, nor copied for that
        if not os.fork():
            try:
                _serve(self._server, modules, parent)
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                os._exit(1)
        self._server.close()

    def command(self, command: str) -> str:
        """What the node is told to start for a worker, instead of this command."""
        return f"{sys.executable} -I -S {__file__} {self.place} {command}"


def _serve(server: socket.socket, modules: Sequence[str], parent: int) -> None:
    import importlib
    import time

    from muster.base.reaper import die_with_parent

    die_with_parent(parent)
    for name in modules:
        importlib.import_module(name)
    gc.freeze()
    server.settimeout(_LOOK_S)
    begun_s: dict[int, float] = {}
    while not _has_failed(begun_s):
        try:
            line, _ = server.accept()
        except TimeoutError:
            continue
        with line:
            data, numbers, _, _ = socket.recv_fds(line, _MOST_BYTES, 3)
            pid = os.fork()
            if not pid:
                server.close()
                line.send(b"1")
                line.close()
                _become(data.decode(errors="surrogateescape").split(_SPLIT), numbers)
            begun_s[pid] = time.monotonic()
            for number in numbers:
                os.close(number)


def _has_failed(begun_s: dict[int, float]) -> bool:
    """Whether a worker died as soon as it was forked, as where this Ray does not bear it: the next
    ones are started as Ray starts them. ``begun_s``: of those that live, which is kept up.
    """
    import time

    while begun_s:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            break
        age_s = time.monotonic() - begun_s.pop(pid, 0.0)
        if status and age_s < _AT_ONCE_S:
            return True
    return False


def _become(told: list[str], numbers: list[int]) -> None:
    """Be the worker, as if it had been started with these words."""
    import runpy

    from muster.base.forked import run_and_leave
    from muster.base.settings import replace_environment

    folder, count, *rest = told
    words, variables = rest[: int(count)], rest[int(count) :]
    for to, number in enumerate(numbers):
        os.dup2(number, to)
        os.close(number)
    os.chdir(folder)
    replace_environment(dict(each.split("=", 1) for each in variables))
    sys.argv[:] = words
    sys.path[0] = os.path.dirname(words[0])

    def work() -> None:
        runpy.run_path(words[0], run_name="__main__")

    run_and_leave(work)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
