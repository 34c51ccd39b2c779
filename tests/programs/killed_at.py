"""A ``sitecustomize`` for all processes of a command: it kills that command right before, or right
after, a file gets its name; see ``tests/chaos/test_exact_moments.py``.

$KILLED_AT: ``before`` or ``after``, and a part of the path, as in ``after latest.json``.
"""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

when, _, part = os.environ["KILLED_AT"].partition(" ")
victim = int(os.environ.setdefault("VICTIM", str(os.getpid())))  # the first of them


def die(place: str) -> None:
    if part not in place or Path("killed").exists():
        return
    Path("killed").touch()
    os.kill(victim, signal.SIGKILL)
    time.sleep(60)  # ended before, with the command


def watched(rename: Callable[..., None]) -> Callable[..., None]:
    def renamed(source: Any, target: Any, **more: Any) -> None:
        if when == "before":
            die(str(target))
        rename(source, target, **more)
        if when == "after":
            die(str(target))

    return renamed


os.rename, os.replace = watched(os.rename), watched(os.replace)
