"""Numbers and counts as people read them. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

from muster.base.clock import human_duration
from muster.base.shown_text import count
from muster.farm.view import Interval, RunView


def rate_text(rate: float | None) -> str:
    """``12.3/s``, or ``4.1/min`` and ``2.0/h`` for slow ones; empty when unknown."""
    if not rate:
        return ""
    for unit, seconds in (("s", 1.0), ("min", 60.0), ("h", 3600.0)):
        if rate * seconds >= 1.0 or unit == "h":
            value = rate * seconds
            return f"{value:,.0f}/{unit}" if value >= 100 else f"{value:.1f}/{unit}"
    return ""


def eta_text(eta: Interval | None) -> str:
    """``left 2.0 s to 3.1 s``: an interval, because a single number would be a guess."""
    if eta is None:
        return ""
    low, high = human_duration(eta.low_s), human_duration(eta.high_s)
    return f"left {low}" if low == high else f"left {low} to {high}"


def left_text(view: RunView) -> str:
    """``left 2.0 h to 3.1 h with 3 of 1,000 workers``: how many it is, where others still wait."""
    states = [line.state for line in view.workers]
    text, num_waiting = eta_text(view.eta), states.count("starting")
    if not text or not num_waiting:
        return text
    num_at_work = states.count("running") + states.count("idle")
    return f"{text} with {num_at_work:,} of {count(num_at_work + num_waiting, 'worker')}"


def counts_text(view: RunView) -> str:
    parts = [f"{view.num_done:,} done"]
    if view.num_failed:
        parts.append(f"{view.num_failed:,} failed")
    if view.num_stopped:
        parts.append(f"{view.num_stopped:,} stopped early")
    if view.num_cancelled:
        parts.append(f"{view.num_cancelled:,} cancelled")
    if view.num_retried:
        parts.append(f"{view.num_retried:,} tried again")
    parts.append(f"{view.num_running} running")
    return ", ".join(parts)


def plain_line(view: RunView) -> str:
    share = 100 * view.num_ended / view.total if view.total else 100.0
    parts = [
        f"{view.name}: {view.num_ended:,}/{view.total:,} ({share:.0f} %)",
        counts_text(view),
        rate_text(view.rate),
        left_text(view) if view.num_ended < view.total else "",
        "" if view.phase in ("running", "ending") else view.phase,
    ]
    return ", ".join(part for part in parts if part)


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
    words = {"waiting": "not run", "running": "cut short", "stopped": "stopped early"}
    shown = ", ".join(
        f"{n:,} {words.get(state, state)}" for state, n in counts.items() if n or state == "done"
    )
    total = sum(counts.values())
    plural = "" if total == 1 else "s"
    return f"{name}: {total:,} task{plural}: {shown}, in {human_duration(elapsed_s)}"
