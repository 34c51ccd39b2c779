"""How a run is seen in a notebook: HTML that is replaced as it goes on; text in a terminal."""

from __future__ import annotations

import html
import importlib
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from muster.api.launch import Audience, Show
from muster.base.clock import human_duration
from muster.base.shown_text import one_line
from muster.farm.view import RunView, counts_text, left_text, plain_line, rate_text

_EVERY_S, _LINE_EVERY_S = 0.3, 5.0
_DRAINING = "stopping: running tasks finish; stop once more to end at once"
_STOPPED = "stopped: what is finished is saved; run this cell again to go on"


@contextmanager
def watched(show: Show | None, failed: str) -> Iterator[Audience]:
    """A context in which ``show`` sees a run; without one, the cell of the notebook that this is
    called from, if it is. ``failed``: where the causes are of what has failed."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if show is not None or shell is None:
        yield Audience() if show is None else Audience(show=show)
        return
    screen = _Cell(failed, is_live=getattr(shell, "kernel", None) is not None)
    try:
        yield Audience(show=screen.show, warn=screen.warn)
    finally:
        screen.end()


class _Cell:
    """``is_live``: what was shown can be replaced; in a terminal each picture is a line."""

    def __init__(self, failed: str, *, is_live: bool) -> None:
        self._failed = failed
        self._display: Any = importlib.import_module("IPython.display")
        self._is_live = is_live
        self._id = uuid.uuid4().hex
        self._every_s = _EVERY_S if is_live else _LINE_EVERY_S
        self._shown_s = float("-inf")
        self._is_begun = False
        self._warnings: list[str] = []
        self._last: RunView | None = None

    def show(self, view: RunView) -> None:
        self._last, now = view, time.monotonic()
        if now - self._shown_s >= self._every_s:
            self._shown_s = now
            self._draw(view, *([_DRAINING] if view.phase == "draining" else []))

    def warn(self, line: str) -> None:
        self._warnings.append(line)

    def end(self) -> None:
        """The last picture, which stays."""
        if self._last is not None:
            last = self._last
            notes = [f"{last.num_failed:,} failed: {self._failed}"] if last.num_failed else []
            notes += [_STOPPED] if last.num_ended < last.total else []
            self._draw(last, *notes, is_over=True)

    def _draw(self, view: RunView, *more: str, is_over: bool = False) -> None:
        happened = (f"{kind}: {text}" for kind, text in view.notes[-3:])
        notes = [*self._warnings, *happened, *more]
        data = {"text/plain": "\n".join([plain_line(view), *map(one_line, notes)])}
        if self._is_live:
            data["text/html"] = picture(view, notes, is_over=is_over)
        known = {"display_id": self._id} if self._is_live else {}
        if self._is_live and self._is_begun:
            self._display.update_display(data, raw=True, **known)
        else:
            self._display.display(data, raw=True, **known)
        self._is_begun = True


def picture(view: RunView, notes: list[str], *, is_over: bool = False) -> str:
    """A bar, how much is done, how fast and how long yet, and a line for each note."""
    share = 100 * view.num_ended / view.total if view.total else 100.0
    rest = "" if is_over or view.num_ended >= view.total else left_text(view)
    facts = [
        f"{view.num_ended:,}/{view.total:,} ({share:.0f} %)",
        counts_text(view),
        human_duration(view.elapsed_s),
        rate_text(view.rate),
        rest,
    ]
    said = " · ".join(html.escape(part) for part in facts if part)
    lines = "".join(f"<div>{html.escape(one_line(note))}</div>" for note in notes)
    return (
        f"<div><b>{html.escape(one_line(view.name))}</b> "
        f'<progress max="{max(1, view.total)}" value="{view.num_ended}"></progress> '
        f"<span>{said}</span>{lines}</div>"
    )
