"""The end of a process that was forked to run a program: as the interpreter's, but faster."""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import os
import sys
import threading
import traceback
from collections.abc import Callable
from typing import NoReturn

_FLUSH_S = 10.0


def run_and_leave(program: Callable[[], int | None]) -> NoReturn:
    """Call ``program`` and end this process with what it returns, or raises as ``SystemExit``.

    It ends as forked processes of multiprocessing do, with its threads joined and its exit
    functions called: taking down all that was imported would last as long as importing it.
    """
    code = 1
    try:
        code = _exit_code(program())
    except SystemExit as end:
        code = _exit_code(end.code)
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            with contextlib.suppress(Exception):
                threading._shutdown()  # type: ignore[attr-defined]  # as multiprocessing does
                atexit._run_exitfuncs()
        finally:
            flush_and_exit(code)


def flush_and_exit(code: int) -> NoReturn:
    """End this process with what its files still hold written, and without waiting for threads."""
    try:
        # Beside, because a pipe may be full that nobody reads any more.
        flusher = threading.Thread(target=_flush_files, daemon=True)
        flusher.start()
        flusher.join(_FLUSH_S)
    finally:
        os._exit(code)


def _exit_code(value: object) -> int:
    """As Python has it: a text is said, and is a failure."""
    if value is None or isinstance(value, int):
        return (value or 0) & 0xFF
    sys.stderr.write(f"{value}\n")
    return 1


def _flush_files() -> None:
    """Write out what files that were opened in this process still hold, as the interpreter would at
    its end; those from before the fork are frozen, and not looked at."""
    opened = [one for one in gc.get_objects() if issubclass(type(one), io.IOBase)]
    for stream in (*opened, sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, only read, or a class of the user's
            stream.flush()
