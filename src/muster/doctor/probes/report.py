"""How a probe speaks: results on standard output, progress on standard error."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from muster.base.reaper import die_with_parent

_RESULTS = 1


def begin() -> int:
    """Call first: nobody outlives the doctor, and libraries that print cannot spoil the results.

    NCCL, for one, writes to standard output when NCCL_DEBUG is set. Returns the descriptor that
    ``result`` writes to.
    """
    die_with_parent(os.getppid())
    results = os.dup(_RESULTS)
    os.dup2(2, _RESULTS)
    return results


def result(descriptor: int, value: dict[str, Any]) -> None:
    """One JSON object as a line. Said several times, the last one counts."""
    os.write(descriptor, (json.dumps(value) + "\n").encode())


def progress(what: str) -> None:
    sys.stderr.write(f"at: {what}\n")
    sys.stderr.flush()


def one_line(error: BaseException, limit: int = 300) -> str:
    """The first line of an error, which is what a table can show."""
    text = str(error).strip().splitlines()
    return (f"{type(error).__name__}: {text[0]}" if text else type(error).__name__)[:limit]
