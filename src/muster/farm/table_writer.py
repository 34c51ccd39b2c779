"""Has the table of a run written by a process of its own (`muster.farm.table_process`): pyarrow
would double the coordinator's memory.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress

from muster.base.errors import SetupError
from muster.base.settings import child_environment
from muster.base.shown_text import shell_word
from muster.farm.table_process import AHEAD
from muster.run.folder import RunFolder


class TableWriter:
    """Writes the table once the work is over. Its process may be begun ahead, while the last tasks
    run: to import pyarrow takes as long as to write 20,000 rows. Close it, so that none is left.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._ahead: subprocess.Popen[bytes] | None = None
        self._may_begin = sys.platform != "win32"  # where nobody can wait for a pipe for some time

    def begin(self) -> None:
        """Have the process import what it needs, and then wait for some seconds; once only."""
        if self._may_begin:
            self._may_begin = False
            with suppress(OSError):  # no room for one more process: it is started later
                self._ahead = _start(self._folder, AHEAD)

    def write(self) -> None:
        """Renew both files; SetupError where that fails, which leaves the old ones in place."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and _told(ahead)[0] == 0:
            return
        # None was begun, or it has waited for too long, or something has ended it meanwhile.
        try:
            code, said = _told(_start(self._folder))
        except OSError as error:  # no room for one more process
            code, said = 1, f"its process could not be started: {error.strerror}.".encode()
        if code != 0:
            reason = said.decode("utf-8", "replace").strip().splitlines()[-1:]
            raise SetupError(
                f"All results are in {self._folder.ledger}, but the table could not be written: "
                f"{reason[0] if reason else f'its process ended with exit code {code}.'}",
                hint="correct the cause, then: "
                f"muster export {shell_word(self._folder.path)} --to results.csv",
            )

    def close(self) -> None:
        """End a process that waits in vain."""
        if self._ahead is not None:
            self._ahead.kill()
            self._ahead.communicate()
            self._ahead = None


def refresh_export(folder: RunFolder) -> None:
    """Renew the exported table in a child process; a failure leaves the old one in place."""
    TableWriter(folder).write()


def exporter(folder: RunFolder) -> tuple[list[str], dict[str, str]]:
    """The command and the environment of the process that writes the table, which ends with us."""
    table = "muster.farm.table_process"
    argv = [sys.executable, "-P", "-m", table, str(folder.path), str(os.getpid())]
    # It calculates nothing: NumPy's threads would only wait, with all of a core each.
    return argv, child_environment({"OPENBLAS_NUM_THREADS": "1"})


def _start(folder: RunFolder, *words: str) -> subprocess.Popen[bytes]:
    argv, environment = exporter(folder)
    return subprocess.Popen(
        [*argv, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C in a terminal is for us: a second one ends it
        env=environment,
    )


def _told(process: subprocess.Popen[bytes]) -> tuple[int, bytes]:
    """Have it write; its exit code and what it has said."""
    try:
        _, said = process.communicate(b"write\n")
    except BaseException:  # an interrupt: the process ends with its standard input or by this
        process.kill()
        process.wait()
        raise
    return process.returncode, said
