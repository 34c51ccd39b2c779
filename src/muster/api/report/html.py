"""A page as HTML in one file: pictures are in it, and nothing is ever loaded from elsewhere.

All texts come from users, their programs and their errors: every one of them is escaped here, and
a policy in the page's head forbids scripts and every connection.
"""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Collection
from typing import Any

from muster.api.report.content import (
    Block,
    Facts,
    Given,
    Listing,
    Page,
    Picture,
    Section,
    Spread,
    Table,
    Text,
    as_given,
    in_words,
)
from muster.base.shown_text import HIDDEN, clean_text, without_secrets

STYLE = """
:root { --ink: #1b1f24; --faint: #57606a; --page: #ffffff; --panel: #f4f6f8; --line: #d0d7de;
  --link: #0b5cad; --good: #1a7f37; --open: #8a5a00; --bad: #b3261e; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ed; --faint: #a3adb8; --page: #14171b; --panel: #1e2329; --line: #3a424c;
    --link: #7db7f2; --good: #57c272; --open: #e3b341; --bad: #ff8a80; }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0 auto; padding: 1.2rem 1rem 3rem; max-width: 72rem; background: var(--page);
  color: var(--ink); font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
  overflow-wrap: break-word; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0 0 .5rem; }
h2 { font-size: 1.2rem; margin: 2.2rem 0 .6rem; padding-bottom: .25rem;
  border-bottom: 1px solid var(--line); }
p { margin: .5rem 0; max-width: 60rem; }
a { color: var(--link); }
nav ul { list-style: none; display: flex; flex-wrap: wrap; gap: .3rem 1.1rem; padding: 0;
  margin: .8rem 0 0; }
.state { font-weight: 600; border-left: .35rem solid; padding: .35rem .7rem;
  background: var(--panel); border-radius: .2rem; }
.good { border-color: var(--good); } .open { border-color: var(--open); }
.bad { border-color: var(--bad); }
pre { background: var(--panel); padding: .7rem; border-radius: .3rem; overflow-x: auto;
  font: .85rem/1.45 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
header pre { white-space: pre-wrap; overflow-wrap: anywhere; }
details { margin: .5rem 0; } summary { cursor: pointer; }
.scroll { overflow: auto; margin: .8rem 0 .2rem; } .tall { max-height: 34rem; }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding: .3rem 0; white-space: nowrap; }
th, td { padding: .28rem .7rem; border-bottom: 1px solid var(--line); text-align: right;
  vertical-align: top; white-space: nowrap; }
th { font-weight: 600; } thead th { position: sticky; top: 0; background: var(--page); }
td.text, th.text { text-align: left; }
.long { text-align: left; white-space: normal; min-width: 18rem; max-width: 34rem; }
.facts { min-width: 20rem; } .facts th { text-align: left; color: var(--faint);
  font-weight: 400; }
.facts td { overflow-wrap: anywhere; white-space: normal; max-width: 40rem; }
figure { margin: 1rem 0; }
figure.small { display: inline-block; vertical-align: top; width: 33rem; max-width: 100%;
  margin-right: 1.5rem; }
img { max-width: 100%; height: auto; background: #ffffff; border: 1px solid var(--line);
  border-radius: .3rem; padding: .3rem; }
figcaption, .note, footer { color: var(--faint); font-size: .88rem; }
footer { margin-top: 2.5rem; border-top: 1px solid var(--line); }
@media print {
  :root { --ink: #000000; --faint: #444444; --page: #ffffff; --panel: #f4f4f4; --line: #bbbbbb;
    --link: #000000; }
  body { max-width: none; padding: 0; font-size: 10pt; }
  nav { display: none; }
  .scroll, .tall { overflow: visible; max-height: none; }
  pre { white-space: pre-wrap; }
  thead th { position: static; }
  th, td { padding: .15rem .35rem; white-space: normal; }
  table { font-size: 8pt; }
  figure, tr { break-inside: avoid; } h2 { break-after: avoid; }
}
"""


_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
_TEXT = ' class="text"'
_LONG = ' class="long"'
_LONG_CHARS = 40
#: What is longer is folded: its beginning is shown, and a click shows the rest.
_MOST_OF_COMMAND, _MOST_OF_SETTING = 600, 200
_MOST_AT_ALL = 1_000_000


def to_html(page: Page, made_by: str, secrets: Collection[str] = ()) -> bytes:
    """The whole page in UTF-8, with none of the ``secrets`` in its texts.

    It reads the pictures, and raises OSError where one cannot be read.
    """
    names = _anchors(page.sections)
    contents = "".join(
        f'<li><a href="#{name}">{_safe(part.title)}</a></li>'
        for name, part in zip(names, page.sections, strict=True)
    )
    sections = "".join(
        _section(name, part) for name, part in zip(names, page.sections, strict=True)
    )
    command = f"<pre><code>{_safe(page.command)}</code></pre>" if page.command else ""
    if len(page.command) > _MOST_OF_COMMAND:
        command = f"<details><summary>{_beginning(page.command)}</summary>\n{command}</details>"
    text = (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{_safe(page.title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f"<header>\n<h1>{_safe(page.title)}</h1>\n<p>{_safe(page.lead)}</p>\n"
        f'<p class="state {page.health}" role="status">{_safe(page.state)}</p>\n{command}\n'
        f'<nav aria-label="Contents"><ul>{contents}</ul></nav>\n</header>\n'
        f"<main>\n{sections}</main>\n"
        f"<footer><p>{_safe(made_by)}</p></footer>\n</body>\n</html>\n"
    )
    for secret in {_safe(secret) for secret in secrets}:
        text = text.replace(secret, HIDDEN)
    return text.encode("utf-8", "replace")


def _section(name: str, part: Section) -> str:
    blocks = "\n".join(map(_block, part.blocks))
    return (
        f'<section id="{name}" aria-labelledby="{name}-title">\n'
        f'<h2 id="{name}-title">{_safe(part.title)}</h2>\n{blocks}\n</section>\n'
    )


def _block(block: Block) -> str:
    match block:
        case Text():
            return f"<p>{_safe(block.text)}</p>"
        case Listing():
            return (
                f"<details><summary>{_safe(block.summary)}</summary>\n"
                f'<pre tabindex="0">{_safe(block.text)}</pre></details>'
            )
        case Table():
            return _table(block)
        case Facts():
            return _facts(block)
        case Picture():
            return _picture(block)


def _table(table: Table) -> str:
    kinds = [_kind_of(column) for column in zip(*table.rows, strict=True)] or [""] * len(
        table.columns
    )
    head = "".join(
        f'<th scope="col"{kind}>{_safe(name)}</th>'
        for name, kind in zip(table.columns, kinds, strict=True)
    )
    body = "".join(f"<tr>{_cells(row, kinds)}</tr>\n" for row in table.rows)
    note = f'<p class="note">{_safe(table.note)}</p>' if table.note else ""
    return (
        f"{_scrolling(table.caption, ' tall')}<table><caption>{_safe(table.caption)}</caption>\n"
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table></div>{note}"
    )


def _facts(facts: Facts) -> str:
    shown = _setting if facts.are_given else _result
    rows = "".join(
        f'<tr><th scope="row">{_safe(name)}</th><td{_TEXT}>{shown(value)}</td></tr>\n'
        for name, value in facts.pairs
    )
    return (
        f"{_scrolling(facts.caption)}"
        f'<table class="facts"><caption>{_safe(facts.caption)}</caption>\n'
        f"<tbody>\n{rows}</tbody></table></div>"
    )


def _result(value: Any) -> str:
    return _safe(in_words(value))


def _setting(value: Any) -> str:
    text = as_given(value, _MOST_AT_ALL)
    if len(text) <= _MOST_OF_SETTING:
        return _safe(text)
    return f"<details><summary>{_beginning(text)}</summary>{_safe(text)}</details>"


def _beginning(text: str) -> str:
    return f"{_safe(text[:120])}… ({len(text):,} characters)"


def _scrolling(caption: str, more: str = "") -> str:
    """The start of a box in which a wide table scrolls, also by the keyboard."""
    return f'<div class="scroll{more}" role="region" tabindex="0" aria-label="{_safe(caption)}">\n'


def _kind_of(column: tuple[Any, ...]) -> str:
    """The class of a column's cells: numbers stand to the right, text to the left, and long text
    is broken into lines."""
    numbers = (int, float, Spread, Given, type(None))
    if all(isinstance(value, numbers) for value in column):
        return ""
    longest = max(len(value) if isinstance(value, str) else 0 for value in column)
    return _LONG if longest > _LONG_CHARS else _TEXT


def _cells(row: tuple[Any, ...], kinds: list[str]) -> str:
    return "".join(
        f"<td{kind}>{_safe(in_words(value))}</td>" for value, kind in zip(row, kinds, strict=True)
    )


def _picture(picture: Picture) -> str:
    data = base64.b64encode(picture.path.read_bytes()).decode("ascii")
    small = ' class="small"' if picture.is_small else ""
    caption = f"<figcaption>{_safe(picture.caption)}</figcaption>" if picture.caption else ""
    return (
        f'<figure{small}><img src="data:image/png;base64,{data}" alt="{_safe(picture.alt)}">'
        f"{caption}</figure>"
    )


def _anchors(sections: tuple[Section, ...]) -> list[str]:
    """A name for each section that a link can use, different from those of all the others."""
    names: list[str] = []
    for part in sections:
        name = re.sub(r"[^a-z0-9]+", "-", part.title.lower()).strip("-") or "part"
        names.append(name if name not in names else f"{name}-{len(names)}")
    return names


def _safe(text: str) -> str:
    return html.escape(clean_text(without_secrets(text)), quote=True)
