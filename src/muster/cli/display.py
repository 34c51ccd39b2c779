"""The live picture of a sweep as rich renderables. Pure: a view in, a renderable out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from muster.base.clock import human_duration
from muster.base.shown_text import one_line
from muster.farm.view import counts_text, left_text, rate_text

if TYPE_CHECKING:
    from muster.farm.view import RunView, WorkerLine

_STYLES = {
    "running": "green",
    "starting": "yellow",
    "ending": "yellow",
    "quarantined": "red",
    "idle": "dim",
    "off": "dim",
}


def render(view: RunView, height: int) -> RenderableType:
    """Total progress, counts, notes and a line per worker, cut to ``height`` terminal rows."""
    parts: list[RenderableType] = [_head(view), _bar(view), Text(counts_text(view))]
    for kind, text in view.notes[-3:]:
        note = one_line(f"{kind}: {text}")
        parts.append(Text(note, style="red", overflow="ellipsis", no_wrap=True))
    if view.phase == "draining":
        parts.append(Text("draining: running tasks finish, Ctrl-C again stops now", "yellow"))
    if view.phase != "ending":
        room = max(1, height - len(parts) - 4)
        parts.append(_workers(view.workers, room))
    return Group(*parts)


def _head(view: RunView) -> Text:
    text = Text(one_line(view.name), style="bold")
    elapsed = human_duration(view.elapsed_s)
    rest = [elapsed, rate_text(view.rate), left_text(view)]
    if view.phase == "ending" or view.num_ended >= view.total:
        rest = [elapsed, rate_text(view.rate)]
    text.append("  " + "  ".join(part for part in rest if part), style="cyan")
    return text


def _bar(view: RunView) -> Table:
    grid = Table.grid(padding=(0, 1))
    bar = ProgressBar(total=max(1, view.total), completed=view.num_ended, width=50)
    share = 100 * view.num_ended / view.total if view.total else 100.0
    grid.add_row(bar, f"{view.num_ended:,}/{view.total:,}", f"{share:.0f} %")
    return grid


def _workers(lines: tuple[WorkerLine, ...], room: int) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for header in ("device", "state", "task", "elapsed", "peak", "ended", ""):
        table.add_column(header, justify="right" if header in ("elapsed", "ended") else "left")
    for line in lines[:room]:
        memory = "" if line.memory_mib is None else f"{line.memory_mib:,.0f} MiB"
        elapsed = "" if line.elapsed_s is None else human_duration(line.elapsed_s)
        table.add_row(
            Text(one_line(line.slot)),
            Text(one_line(line.state), style=_STYLES.get(line.state, "")),
            Text(one_line(line.task)),
            elapsed,
            memory,
            f"{line.num_ended:,}" if line.num_ended else "",
            Text(one_line(line.progress, 40)),
        )
    if len(lines) > room:
        table.add_row(f"… and {len(lines) - room} more")
    return table
