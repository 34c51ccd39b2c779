"""The only module that prints: lines, complaints, JSON, tables, and the two kinds of screen."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, TextIO

from muster.base.shown_text import clean_text, json_text, one_line

if TYPE_CHECKING:
    from rich.console import RenderableType

    from muster.farm.view import RunView

#: How much is shown, each with all before it.
ShownLevel = Literal["nothing", "warning", "info", "debug"]

_PLAIN_EVERY_S = 5.0


def say(text: str = "") -> None:
    """A line for people, on standard output."""
    _print(text, sys.stdout)


def remark(text: str) -> None:
    """A line beside the result, on standard error."""
    _print(text, sys.stderr)


def complain(text: str) -> None:
    _print(f"muster: {text}", sys.stderr)


def show_events(*, are_shown: bool) -> None:
    """Every event of a run as a line on standard error, from now on or no longer."""
    import logging  # here: most commands log nothing, and start in half of the time without

    from muster.base.journal import EVENTS

    class EventLines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            remark(f"debug: {one_line(record.getMessage())}")

    EVENTS.handlers.clear()
    EVENTS.propagate = not are_shown  # a task in this process may log to the same terminal
    EVENTS.setLevel(logging.DEBUG if are_shown else logging.NOTSET)
    if are_shown:
        EVENTS.addHandler(EventLines())


#: Where a document goes while standard output is kept for it.
_documents: list[TextIO] = []


@contextmanager
def only_json() -> Iterator[None]:
    """A context: standard output is for a document alone. Whatever else prints, such as a file of
    the user's that is imported or a task in this process, does so on standard error."""
    _documents.append(sys.stdout)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _documents.pop()


def say_json(value: Any) -> None:
    """One JSON document on standard output; NaN and infinity as strings, so that it is JSON."""
    import json

    stream = _documents[-1] if _documents else sys.stdout
    safe = _json_safe(value)
    text = json_text(json.dumps(safe, indent=2, ensure_ascii=False))
    try:
        text.encode(stream.encoding or "utf-8")
    except UnicodeEncodeError:  # written out in another way than JSON's, it would not be JSON
        text = json.dumps(safe, indent=2)
    _print(text, stream)


def _print(text: str, stream: TextIO) -> None:
    """The one door: a terminal gets no orders from users' texts, and no encoding ends a run."""
    if stream.isatty():
        text = clean_text(text, colours=True)
    try:
        print(text, file=stream, flush=True)
    except UnicodeEncodeError:
        encoding = stream.encoding
        print(text.encode(encoding, "backslashreplace").decode(encoding), file=stream, flush=True)


def pass_on(data: bytes) -> None:
    """What a program has printed: as it is, but to a terminal only what that may show."""
    raw = getattr(sys.stdout, "write_raw", None)
    if raw is None or sys.stdout.isatty():
        # Of a line that a progress bar has rewritten, what stays in the end.
        lines = data.decode("utf-8", "replace").removesuffix("\n").split("\n")
        if data:
            say("\n".join(line.rstrip("\r").rpartition("\r")[2] for line in lines))
        return
    raw(data)


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table as wide as the terminal on a terminal, and plain aligned columns elsewhere."""
    headers, *rows = [[one_line(cell) for cell in row] for row in [headers, *rows]]
    if is_terminal():
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        grid = Table(*headers, box=None, pad_edge=False, header_style="bold")
        for row in rows:
            grid.add_row(*map(Text, row))
        Console(markup=False).print(grid)
        return
    for line in table_lines(headers, rows):
        say(line)


def table_lines(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The same as plain aligned columns."""
    widths = [max(len(row[i]) for row in [headers, *rows]) for i in range(len(headers))]
    return [
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in [headers, *rows]
    ]


def amount(num_done: int | None, num_total: int | None, unit: str) -> str:
    """``3/? chunks``; empty where nothing is counted."""
    total = "?" if num_total is None else f"{num_total:,}"
    return "" if num_done is None else f"{num_done:,}/{total} {unit}".rstrip()


def is_terminal() -> bool:
    return sys.stdout.isatty()


class Screen(Protocol):
    """Shows a running sweep; a context so that the terminal is always given back."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def show(self, view: RunView) -> None: ...

    def line(self, text: str) -> None: ...

    def warn(self, text: str) -> None: ...


class SilentScreen:
    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def show(self, view: RunView) -> None:
        return

    def line(self, text: str) -> None:
        return

    def warn(self, text: str) -> None:
        return


class WarningScreen(SilentScreen):
    """A line for everything that may be wrong."""

    def __init__(self) -> None:
        self._notes = 0

    def show(self, view: RunView) -> None:
        for kind, text in view.notes[self._notes :]:
            remark(f"{kind}: {text}")
        self._notes = len(view.notes)

    def warn(self, text: str) -> None:
        remark(text)


class PlainScreen(WarningScreen):
    """Lines, for logs and pipes: one every few seconds and one for everything that happens."""

    def __init__(self, say: Callable[[str], None] = remark) -> None:
        super().__init__()
        self._say = say
        self._due_s = 0.0
        self._waits: dict[str, str] = {}
        self._last = ""

    def show(self, view: RunView) -> None:
        super().show(view)
        waits = waiting_lines(view)
        for reason in waits.keys() - self._waits.keys():
            self._say(waits[reason])
        self._waits = waits
        is_last = view.phase == "ending"
        if time.monotonic() < self._due_s and not is_last:
            return
        self._due_s = time.monotonic() + _PLAIN_EVERY_S
        from muster.farm.view import plain_line  # of no use to whoever only asks for help

        text = plain_line(view)
        if text != self._last:
            self._say(text)
        self._last = text

    def line(self, text: str) -> None:
        self._say(text)


class LiveScreen(SilentScreen):
    """The live display of a terminal, drawn by ``cli.screens``."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(stderr=True, markup=False, emoji=False)
        self._live = Live(console=self._console, refresh_per_second=8, transient=False)

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.__exit__(None, None, None)

    def show(self, view: RunView) -> None:
        from muster.cli.screens import render

        picture: RenderableType = render(view, self._console.height)
        self._live.update(picture)

    def line(self, text: str) -> None:
        self._console.print(clean_text(text), highlight=False)

    def warn(self, text: str) -> None:
        self.line(text)


class LivePicture:
    """A region of the terminal that is drawn anew; a context that gives the terminal back."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(markup=False, emoji=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=False)

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.__exit__(None, None, None)

    @property
    def size(self) -> tuple[int, int]:
        """Columns and rows, now."""
        return self._console.width, self._console.height

    def show(self, picture: RenderableType) -> None:
        self._live.update(picture, refresh=True)

    def show_lines(self, lines: Sequence[str]) -> None:
        from rich.text import Text

        shown = [one_line(line, 1000) for line in lines[: max(1, self.size[1] - 1)]]
        self.show(Text("\n".join(shown), no_wrap=True, overflow="ellipsis"))


class Bar:
    """A progress bar at the bottom of the terminal, with lines above it."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self._progress = Progress(
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=20),
            TextColumn("{task.description}", markup=False),
            console=Console(markup=False, emoji=False),
            transient=True,
        )
        self._task = self._progress.add_task("starting", total=1)

    def start(self) -> None:
        self._progress.start()

    def stop(self) -> None:
        self._progress.stop()

    def line(self, text: str) -> None:
        self._progress.console.print(clean_text(text), highlight=False)

    def show(self, done: int, total: int, words: str) -> None:
        words = one_line(words)
        self._progress.update(self._task, completed=done, total=total, description=words)


def make_bar() -> Bar:
    return Bar()


def make_screen(level: ShownLevel) -> Screen:
    if level == "nothing":
        return SilentScreen()
    if level == "warning":
        return WarningScreen()
    # Lines of events would break into a picture.
    return LiveScreen() if level == "info" and sys.stderr.isatty() else PlainScreen()


def _json_safe(value: Any) -> Any:
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    if isinstance(value, dict):
        return {str(key): _json_safe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_safe(item) for item in value]
    return value


def waiting_lines(view: RunView) -> dict[str, str]:
    """Why workers do not start yet: by reason, a line that names the first of them."""
    waiting: dict[str, list[tuple[str, str]]] = {}
    for line in view.workers:
        if line.state == "starting" and line.progress:
            # Which job it is differs between workers that wait for the same.
            reason = re.sub(r"\bjob \d+_\d+", "job", line.progress)
            waiting.setdefault(reason, []).append((line.slot, line.progress))
    lines = {}
    for reason, workers in waiting.items():
        more = f", like {len(workers) - 1:,} more" if len(workers) > 1 else ""
        lines[reason] = f"{workers[0][0]} {workers[0][1]}{more}"
    return lines


def summary_line(name: str, counts: Mapping[str, int], elapsed_s: float) -> str:
    from muster.base.clock import human_duration

    words = {"waiting": "not run", "running": "cut short", "stopped": "stopped early"}
    shown = ", ".join(
        f"{n:,} {words.get(state, state)}" for state, n in counts.items() if n or state == "done"
    )
    total = sum(counts.values())
    plural = "" if total == 1 else "s"
    return f"{name}: {total:,} task{plural}: {shown}, in {human_duration(elapsed_s)}"
