"""A call in a process of its own, with which all ends that it has imported and held.

A coordinator lives as long as its map, and Arrow alone takes more memory than all that it needs.
"""

from __future__ import annotations

import os
import pickle
import secrets
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Generic, ParamSpec, TypeVar, cast

from muster.base.errors import MusterError, SetupError
from muster.base.reaper import die_with_parent
from muster.base.settings import child_environment

P = ParamSpec("P")
T = TypeVar("T")
#: What a process is told last.
_END = "there is no more"
#: What such a process frees goes back to the system. Arrow's own allocator keeps several row groups
#: of it, and so does glibc: for each thread, and where blocks of so many bytes are from its heap.
_MEMORY = {
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(128 << 10),
}
_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")


def apart(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What a function of a module returns, or raise what it raises. Arguments and result are
    pickled. The process ends with this one, however this one ends, and hears no signal before.
    """
    return Call(function, *args, **kwargs).result()


class Call(Generic[T]):
    """A call as `apart` makes it, which may be told more while it runs (see `told`).

    Its process ends with the thread that has made it: that is what Linux takes for its parent.
    """

    def __init__(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> None:
        self._name = function.__name__.replace("_", " ").strip()
        self._mark = secrets.token_bytes(16)  # what a sitecustomize prints comes before it
        self._unsent = pickle.dumps((function, args, kwargs))
        self._process = subprocess.Popen(
            # The folder of the command may hold a numpy.py that is not the one.
            [sys.executable, "-P", "-m", __name__, str(os.getpid()), self._mark.hex()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            # Threads of a library that is only imported would spin for a while, and find nothing
            # to do.
            env=child_environment({"OPENBLAS_NUM_THREADS": "1", **_MEMORY}),
        )

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def has_room(self) -> bool:
        """Whether it can be told a short message without waiting until it listens."""
        assert self._process.stdin is not None
        poll = select.poll()  # `select` knows no descriptor above 1,023
        poll.register(self._process.stdin, select.POLLOUT)
        return bool(poll.poll(0))

    def tell(self, message: Any) -> None:
        """Send something that can be pickled. If the process has ended, `result` says so."""
        assert self._process.stdin is not None
        unsent, self._unsent = self._unsent, b""
        with suppress(BrokenPipeError):
            self._process.stdin.write(unsent + pickle.dumps(message))
            self._process.stdin.flush()

    def result(self) -> T:
        """Tell it that there is no more, wait, and return or raise what the function does."""
        try:
            self.tell(_END)  # a child that somebody has forked may hold the pipe open for long
            answer, _ = self._process.communicate()
        except BaseException:
            self.end()
            raise
        said, is_whole, result_bytes = answer.partition(self._mark)
        if said:
            sys.stderr.write(said.decode(errors="replace"))
        code = self._process.returncode
        if code or not is_whole:
            how = f"ended with exit code {code}" if code >= 0 else f"was ended by signal {-code}"
            short = "memory may have been short, for which a system does that; "
            raise SetupError(
                f"The process that was to {self._name} {how}; what it said is above.",
                hint=f"{short if code == -9 else ''}run the same command again; nothing finished "
                "is lost.",
            )
        result, error = pickle.loads(result_bytes)
        if error is not None:
            raise error
        return cast(T, result)

    def end(self) -> None:
        """Kill the process where it still runs."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):  # of what was not read
                pipe.close()


def told() -> Iterator[Any]:
    """In the process of a `Call`: what it is told, until there is no more."""
    with suppress(EOFError):
        while (message := pickle.load(sys.stdin.buffer)) != _END:
            yield message


def main(argv: list[str]) -> None:
    for name in _SIGNALS:  # of a job that is ended; the caller decides what becomes of this
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    die_with_parent(int(argv[0]))
    # What a library prints must not get into the answer.
    answer = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    function, args, kwargs = pickle.load(sys.stdin.buffer)
    result: tuple[Any, Exception | None]
    try:
        result = function(*args, **kwargs), None
    except Exception as error:
        if not isinstance(error, MusterError | OSError):
            raise  # its traceback is shown
        result = None, error
    with answer:
        answer.write(bytes.fromhex(argv[1]))
        pickle.dump(result, answer)


if __name__ == "__main__":
    main(sys.argv[1:])
