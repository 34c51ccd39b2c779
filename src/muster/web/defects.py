"""What goes wrong inside the dashboard, said where it was started: once for each place in it."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from pathlib import Path

from muster.base.errors import MusterError
from muster.base.shown_text import one_line, without_secrets

_MOST_SAID = 50


class Defects:
    """Methods may be called from any thread."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._said: set[str] = set()
        self._lock = threading.Lock()

    def note(self, error: BaseException | None) -> None:
        """Say it, unless it is a sentence of ours, a file that cannot be read, or was said."""
        if error is None or isinstance(error, MusterError | OSError):
            return
        steps = traceback.extract_tb(error.__traceback__)
        ours = [step for step in steps if "muster" in Path(step.filename).parts] or steps
        where = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else "?"
        kind = f"{type(error).__name__} at {where}"
        with self._lock:
            if kind in self._said or len(self._said) >= _MOST_SAID:
                return
            self._said.add(kind)
        self._tell(one_line(without_secrets(f"A page failed: {kind}: {str(error)[:500]}")))
