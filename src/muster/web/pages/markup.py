"""HTML in which every text is escaped: a tag is a function call, and only tags make tags; and what
several pages show: links, states, bars, a run's head. Pure.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

from muster.base.clock import human_duration
from muster.base.shown_text import clean_text

_EMPTY = frozenset({"meta", "link", "input", "br", "img"})
_SURROGATE = re.compile(r"[\ud800-\udfff]")
MOST_CHARS = 20_000
#: In the order of a bar. Words in which a state comes, and the one that is shown for it.
STATES = ("done", "failed", "stopped", "cancelled", "running", "waiting")
_SAME = {
    "ready": "waiting", "open": "waiting", "queued": "waiting", "claimed": "running",
    "starting again": "running", "refused": "failed", "saved": "stopped", "ok": "done",
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


class Html(str):
    """A text that is HTML already, because `tag` or `join` made it."""

    __slots__ = ()


def tag(name: str, /, *children: object, **attributes: object) -> Html:
    """An element. Texts are escaped; None and False are left out, in attributes too.

    >>> tag("a", "1 < 2", href='/x?a="b"', class_="k", hidden=True, data_n=None)
    '<a href="/x?a=&quot;b&quot;" class="k" hidden>1 &lt; 2</a>'
    """
    shown = "".join(
        f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{_safe(value)}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    if name in _EMPTY:
        return Html(f"<{name}{shown}>")
    return Html(f"<{name}{shown}>{join(children)}</{name}>")


def join(parts: Iterable[object]) -> Html:
    return Html(
        "".join(
            part if isinstance(part, Html) else _safe(part)
            for part in parts
            if part is not None and part is not False
        )
    )


def table(name: str, heads: Sequence[tuple[str, bool]], rows: Iterable[Sequence[object]]) -> Html:
    """``heads``: a label, and whether its column holds numbers; empty where there are no rows."""
    body = [
        tag("tr", *[
            tag("td", _cell(cell), class_="num" if number else None)
            for cell, (_, number) in zip(row, heads, strict=False)
        ])
        for row in rows
    ]  # fmt: skip
    if not body:
        return Html("")
    head = [tag("th", label, scope="col", class_="num" if num else None) for label, num in heads]
    return tag(
        "div",
        tag("table", tag("caption", name, class_="sr"), tag("thead", tag("tr", *head)),
            tag("tbody", *body)),
        class_="scroll", tabindex="0", role="region", aria_label=name,
    )  # fmt: skip


def facts(pairs: Iterable[tuple[str, object]]) -> Html:
    """Names and values; those that are not known are left out."""
    known = [(name, value) for name, value in pairs if value is not None and value != ""]
    if not known:
        return Html("")
    return tag(
        "dl",
        *[tag("div", tag("dt", name), tag("dd", _cell(value))) for name, value in known],
        class_="facts",
    )


def _cell(value: object) -> object:
    return value if isinstance(value, Html) else shown(value)


def shown(value: Any) -> str:
    """A value as a cell shows it.

    >>> shown(None), shown(0.1 + 0.2), shown(1e-7), shown(True), shown([1, "a"]), shown(120000)
    ('–', '0.3', '1e-07', 'true', '[1, a]', '120000')
    """
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(shown, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {shown(one)}" for key, one in value.items()) + "}"
    return str(value)


def _safe(value: object) -> str:
    text = clean_text(str(value)[:MOST_CHARS])
    return html.escape(_SURROGATE.sub("\ufffd", text))


@dataclass(frozen=True)
class Links:
    root: str
    suffix: str

    def to(self, path: str) -> str:
        """
        >>> Links("/", "").to(""), Links("../", ".html").to(""), Links("../", ".html").to("run/1f")
        ('/', '../index.html', '../run/1f.html')
        """
        if not path:
            return self.root + (f"index{self.suffix}" if self.suffix else "")
        return self.root + quote(path, errors="replace") + self.suffix

    def run(self, run_id: object, page: str = "overview") -> str:
        return self.to(f"run/{run_id}" + ("" if page == "overview" else f"/{page}"))

    def task(self, run_id: object, key: object) -> str:
        return self.to(f"run/{run_id}/task/{key}")

    def static(self, path: str) -> str:
        return f"{self.root}static/{path}"


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
            ("Best", best_of(best)),
            ("Folder", run.get("path")),
        ]
    )


def best_of(best: Any) -> str | None:
    return f"{best['name']} = {shown(best['value'])}" if best else None


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
