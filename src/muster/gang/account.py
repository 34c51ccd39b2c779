"""What a rank writes down of the exception that ends it."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import runpy
import sys
import time
import traceback
from types import TracebackType

from muster.base.codec import write_json
from muster.run.folder import RunFolder

_OURS = ("/muster/gang/", "/muster/rank/", "/muster/train/", "/muster/rl/", "<frozen ")
_MAX_MESSAGE = 4000
#: What has been told, in this process.
_told: BaseException | None = None


def give_account(error: BaseException, folder: RunFolder, rank: int) -> None:
    """Write the traceback to the log, as Python shows it, and the record for the report; once for
    each error, however often it is told on its way out, and not again for what it has led to."""
    global _told
    error = _as_raised(error)
    if _told is not None and any(_told is one for one in _with_earlier(error)):
        return
    _told = error
    now_s = time.time()
    trace = _without_ours(error)
    frames = traceback.format_list(traceback.extract_tb(trace))
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    lines = [line for frame in frames for line in frame.rstrip().splitlines() if line.strip(" ^~")]
    record = {
        "type": type(error).__qualname__,
        "message": _message(error),
        "frames": lines,
        "time_s": now_s,
    }
    with contextlib.suppress(OSError):  # the program may have closed it
        # The launcher keeps what follows off the screen: its report has it, for the culprit only.
        record["log_start"] = os.fstat(2).st_size
    with contextlib.suppress(OSError):  # a full disk: the log may still hold it
        write_json(folder.rank_error(rank), record)
    error.with_traceback(trace)  # one that is frozen refuses to be assigned it
    with contextlib.suppress(OSError, ValueError):
        sys.excepthook(type(error), error, trace)
        sys.stderr.flush()


def _as_raised(error: BaseException) -> BaseException:
    """What the user's code has raised, where contextlib has failed to pass on a frozen one."""
    while isinstance(error, dataclasses.FrozenInstanceError) and "__traceback__" in str(error):
        if error.__context__ is None:
            break
        error = error.__context__
    return error


def _with_earlier(error: BaseException) -> list[BaseException]:
    """It, and those that were being handled when it and they were raised."""
    found: list[BaseException] = []
    later: BaseException | None = error
    while later is not None and not any(later is one for one in found):
        found.append(later)
        later = later.__cause__ or later.__context__
    return found


def _message(error: BaseException) -> str:
    try:
        return str(error)[:_MAX_MESSAGE]
    except Exception as second:
        return f"(its text cannot be shown: {type(second).__name__})"


def _without_ours(error: BaseException) -> TracebackType | None:
    """The traceback from the user's first frame on; None where only finding the program failed."""
    trace = error.__traceback__
    while trace is not None and _is_ours(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    is_plain = isinstance(error, SyntaxError | OSError | ImportError)
    return trace if trace is not None or is_plain else error.__traceback__


def _is_ours(path: str) -> bool:
    path = path.replace("\\", "/")
    return any(part in path for part in _OURS) or path in (
        runpy.__file__,
        importlib.__file__,
    )
