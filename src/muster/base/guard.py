"""Keeps a warden beside a coordinator or a launcher, and starts another should it be killed."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from muster.base import warden
from muster.base.processes import IS_LINUX
from muster.base.settings import child_environment

_GOODBYE_S = 5.0


class Guard:
    """Linux only: elsewhere workers watch their parent themselves and ``start`` does nothing."""

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe = -1

    def start(self) -> None:
        if not IS_LINUX:
            return
        read_end, self._pipe = os.pipe()
        source = str(Path(warden.__file__).parents[2])
        # Without site-packages: a warden must start fast and outlive a broken environment.
        start = (
            "import sys; sys.path.insert(0, sys.argv[1]); "
            "from muster.base.warden import main; sys.exit(main(sys.argv[2:]))"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-E", "-c", start, source, str(read_end), self._mark],
            pass_fds=(read_end,),
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env=child_environment({}),
        )
        os.close(read_end)

    def check(self) -> None:
        """Replace a warden that has died; costs one system call."""
        if self._process is not None and self._process.poll() is not None:
            os.close(self._pipe)
            self.start()

    def dismiss(self) -> None:
        """Everything has been ended: the warden may go."""
        if self._process is None:
            return
        with suppress(BrokenPipeError):
            os.write(self._pipe, b".")
        os.close(self._pipe)
        try:
            self._process.wait(timeout=_GOODBYE_S)
        except subprocess.TimeoutExpired:  # somebody has stopped it
            self._process.kill()
            self._process.wait()
        self._process = None
