"""The process in which ``math-verify`` runs. Started by ``referee.py`` as a file of its own.

It reads a line of JSON, ``[limit_s, answer, reference]``, and answers ``true``, ``false`` or
``null`` (one of them cannot be read). What takes more processor time than its limit kills the
process: computer algebra spends its time in C, where no Python exception reaches it. It ends with
its input.

It imports nothing of muster, so that it starts quickly and in any folder. On Windows, which has
neither of the two limits, it runs without them.
"""

from __future__ import annotations

import json
import logging
import signal
import sys
from typing import Any

_MEMORY_BYTES = 4 << 30


def main() -> None:
    import math_verify  # type: ignore[import-untyped]

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is its parent's to handle
    if sys.platform != "win32":
        _limit_memory()
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
    logging.disable(logging.CRITICAL)  # it warns that its own time limits are off, on each call
    for line in sys.stdin:
        limit_s, answer, reference = json.loads(line)
        _limit_time(limit_s)
        verdict = _compare(math_verify, answer, reference)
        _limit_time(0)
        sys.stdout.write(json.dumps(verdict) + "\n")
        sys.stdout.flush()


def _limit_memory() -> None:
    import resource

    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    wanted = _MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(hard, _MEMORY_BYTES)
    resource.setrlimit(resource.RLIMIT_DATA, (wanted, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def _limit_time(limit_s: float) -> None:
    """End the process after so much processor time from now; 0: no more."""
    if sys.platform != "win32":
        signal.setitimer(signal.ITIMER_PROF, limit_s)


def _compare(library: Any, answer: str, reference: str) -> bool | None:
    try:
        gold, found = _read(library, reference), _read(library, answer)
        if not gold or not found:
            return None
        return bool(library.verify(gold, found, timeout_seconds=None))
    except (Exception, RecursionError):
        return None


def _read(library: Any, text: str) -> list[Any]:
    """The library looks for marked mathematics; an answer is all mathematics."""
    found = list(library.parse(f"${text}$", parsing_timeout=None))
    # The text itself comes last; where nothing comes before it, it could not be read.
    return [] if all(isinstance(item, str) for item in found) else found


if __name__ == "__main__":
    main()
