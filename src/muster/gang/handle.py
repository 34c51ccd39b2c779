"""The supervisor as whoever has started it holds it: a process, its pipes, and its end.

It is started before what it will run is known, because it imports torch for seconds.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import IO

from muster.base import processes
from muster.base.errors import MissingPackageError, SetupError, how_to_install
from muster.base.modules import environment_with
from muster.base.reaper import Reaper
from muster.base.settings import child_environment, waiting_threads

#: As in pyproject.toml, which pip does not look at where the extra was not asked for.
OLDEST_TORCH = (2, 7)


class SupervisorHandle(contextlib.AbstractContextManager["SupervisorHandle"]):
    """A supervisor that is starting up; a context that leaves nothing running."""

    def __init__(self, *, forks: bool) -> None:
        # Orphans of ranks become our children, so that no zombie of theirs stays.
        self._was_subreaper = processes.set_subreaper(True)
        self.forks = forks
        self.mark = f"gang-{secrets.token_hex(8)}"
        self.ooms_before = processes.out_of_memory_kills()
        self.words: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  (closed by `close`)
        self._reaper = Reaper(self.mark)
        self._reaper.start()
        # Its own BLAS has one thread, or it could not be forked; ranks get their share.
        environment = {
            processes.RUN_MARKER: self.mark,
            "OPENBLAS_NUM_THREADS": "1",
            **waiting_threads(),
        }
        command = [sys.executable, "-u", "-P", "-m", "muster.supervisor.main", str(os.getpid())]
        self.process = subprocess.Popen(
            [*command, *(["fork"] if forks else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.words,
            start_new_session=True,
            env=child_environment(environment),
        )

    def __exit__(self, *_: object) -> None:
        self.close()

    def check(self) -> None:
        self._reaper.check()

    def close(self) -> None:
        """End whatever still runs. May be called again."""
        if self.words.closed:
            return
        processes.signal_group(self.process.pid, processes.KILL)
        processes.end_marked(self.mark, [self.process.pid])
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        self.words.close()
        self._reaper.dismiss()
        processes.set_subreaper(self._was_subreaper)


@contextlib.contextmanager
def supervising(*, is_wanted: bool, forks: bool) -> Iterator[SupervisorHandle | None]:
    """A context with a supervisor that is starting up, if it ``is_wanted``."""
    if not is_wanted:
        yield None
        return
    with start_supervisor(forks=forks) as supervisor:
        yield supervisor


def start_supervisor(*, forks: bool = False) -> SupervisorHandle:
    """Start the supervisor early: it imports torch while the caller still decides what to run.

    ``forks``: the spec will say ``start="fork"``. Use it as a context or call ``close``. Raises
    MissingPackageError where torch is not installed, SetupError where it is too old.
    """
    if importlib.util.find_spec("torch") is None:
        there = environment_with("torch")
        instead = f"{there}/bin/pip install muster-gpu, and then {there}/bin/muster"
        raise MissingPackageError(
            "Starting ranks", "torch", "torch", instead=instead if there else ""
        )
    from importlib import metadata

    with contextlib.suppress(metadata.PackageNotFoundError):  # it is on the path and not installed
        found = metadata.version("torch")
        numbers = re.match(r"(\d+)\.(\d+)", found)
        if numbers is not None and tuple(map(int, numbers.groups())) < OLDEST_TORCH:
            oldest = ".".join(map(str, OLDEST_TORCH))
            raise SetupError(
                f"Starting ranks needs torch {oldest} or newer, and torch {found} is installed.",
                hint=f"{how_to_install('torch')}.",
            )
    return SupervisorHandle(forks=forks)
