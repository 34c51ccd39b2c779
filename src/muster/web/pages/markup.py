"""HTML in which every text is escaped: a tag is a function call, and only tags make tags. Pure."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from typing import Any

from muster.base.shown_text import clean_text

_EMPTY = frozenset({"meta", "link", "input", "br", "img"})
_SURROGATE = re.compile(r"[\ud800-\udfff]")
MOST_CHARS = 20_000


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
