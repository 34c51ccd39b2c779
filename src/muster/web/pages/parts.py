"""What several pages show: a state, a verdict, counts as a bar, a run's head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from muster.base.clock import human_duration
from muster.web.pages.links import Links
from muster.web.pages.markup import Html, facts, shown, tag

#: In the order of a bar. Words in which a state comes, and the one that is shown for it.
STATES = ("done", "failed", "stopped", "cancelled", "running", "waiting")
_SAME = {
    "ready": "waiting", "open": "waiting", "queued": "waiting", "claimed": "running",
    "refused": "failed", "saved": "stopped", "ok": "done",
}  # fmt: skip
#: What the ledger calls otherwise than a reader would.
_PLAIN = {"ready": "waiting", "claimed": "running"}
#: A shape for each state, because colours alone do not tell it.
_MARKS = {
    "done": "✓", "failed": "✕", "stopped": "◼", "cancelled": "⊘", "running": "▶", "waiting": "○",
}  # fmt: skip
_LEVELS = {"good": "✓", "working": "▶", "bad": "✕", "paused": "‖"}
_LABELS = {
    "overview": "Overview", "tasks": "Tasks", "search": "Search", "training": "Training",
    "map": "Map", "errors": "Errors", "about": "About",
}  # fmt: skip


def state(word: Any) -> Html:
    """A state as its mark and its word."""
    text = str(word or "–")
    kind = _SAME.get(text, text)
    known = kind if kind in _MARKS else "waiting"
    mark = tag("span", _MARKS[known], class_="mark", aria_hidden="true")
    return tag("span", mark, " ", _PLAIN.get(text, text), class_=f"state s-{known}")


def level(verdict: Any, word: Any = "") -> str:
    if isinstance(verdict, Mapping) and verdict.get("level") in _LEVELS:
        return str(verdict["level"])
    return {"done": "good", "running": "working", "failed": "bad"}.get(str(word), "paused")


def run_head(run: Mapping[str, Any], page: str, links: Links) -> Html:
    """The verdict first, how far it is, and the tabs."""
    verdict = run.get("verdict") or {}
    found = level(verdict, run.get("state"))
    text = verdict.get("text") if isinstance(verdict, Mapping) else str(verdict)
    tabs = [
        tag("a", _LABELS[name], href=links.run(run["id"], name),
            aria_current="page" if name == page or (name, page) == ("tasks", "task") else None)
        for name in run.get("tabs") or ("overview",)
    ]  # fmt: skip
    return tag(
        "div",
        tag("div",
            tag("h1", str(run["name"])),
            tag("span", shown(run.get("kind")), class_="kind"),
            class_="title"),
        tag("div",
            tag("span", _LEVELS[found], class_="mark", aria_hidden="true"),
            tag("p", text or shown(run.get("state"))),
            class_=f"verdict v-{found}", role="status"),
        bar(run.get("counts")),
        tag("nav", *tabs, class_="tabs", aria_label="Pages of this run"),
        id="head",
    )  # fmt: skip


def bar(counts: Any) -> Html:
    """How many tasks are in which state, as words and as a bar; empty where none are counted."""
    found = [(name, int(counts.get(name) or 0)) for name in STATES] if counts else []
    total = sum(number for _, number in found)
    if not total:
        return Html("")
    parts, at = [], 0.0
    for name, number in found:
        width = 100 * number / total
        if number:
            parts.append(
                tag("rect", x=f"{at:.3f}%", y="0", width=f"{width:.3f}%", height="100%",
                    class_=f"f-{name}")
            )  # fmt: skip
        at += width
    words = [
        tag("li", state(name), " ", tag("b", f"{number:,}")) for name, number in found if number
    ]
    return tag(
        "div",
        tag("svg", *parts, class_="bar", role="img", aria_label=_worded(found)),
        tag("ul", *words, class_="counts"),
        class_="progress",
    )


def _worded(found: Sequence[tuple[str, int]]) -> str:
    return ", ".join(f"{number} {name}" for name, number in found if number)


def summary(run: Mapping[str, Any]) -> Html:
    """Rate, what is left, how long it took, and the best so far."""
    eta, best, rate = run.get("eta_s"), run.get("best"), run.get("rate")
    return facts(
        [
            ("Left", interval(eta)),
            ("Rate", f"{rate:.4g} per second" if isinstance(rate, int | float) else None),
            ("Took", duration(run.get("seconds"))),
            ("Best", f"{best['name']} = {shown(best['value'])}" if best else None),
            ("Folder", run.get("path")),
        ]
    )


def interval(eta: Any) -> str | None:
    """From the least to the most that is left."""
    if not eta or any(one is None for one in eta):
        return None
    least, most = human_duration(eta[0]), human_duration(eta[-1])
    return least if least == most else f"{least} – {most}"


def duration(seconds: Any) -> str | None:
    return human_duration(float(seconds)) if isinstance(seconds, int | float) else None


def moment(seconds: Any) -> Html | None:
    """A time in UTC; the browser shows its own."""
    if not isinstance(seconds, int | float):
        return None
    try:
        when = datetime.fromtimestamp(seconds, UTC)
    except (ValueError, OverflowError, OSError):
        return None
    text = when.strftime("%Y-%m-%d %H:%M UTC")
    return tag("time", text, datetime=when.isoformat(timespec="seconds"))


def size(number: Any) -> str | None:
    """
    >>> size(0), size(2048), size(3 << 30), size(None)
    ('0 B', '2.0 KiB', '3.0 GiB', None)
    """
    if not isinstance(number, int | float):
        return None
    value = float(number)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
