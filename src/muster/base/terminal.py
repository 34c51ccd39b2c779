"""Users' text as data: what a terminal would obey is taken out or made visible. Pure.

Parameters, names, messages and log lines come from programs, other users and file names. Shown on
a terminal they must not move the cursor, set the title, hide or reverse what stands beside them.
"""

from __future__ import annotations

import re

_COLOUR = re.compile(r"\x1b\[[0-9;:]*m\Z")
_COLOUR_OFF = "\x1b[0m"
#: Whole sequences: CSI (cursor, colours), strings up to their end (OSC, DCS, PM, APC), two-letter
#: ones. What is left of a broken one falls to the last alternative or to ``_UNSEEN``.
_SEQUENCE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x80-\x9f]*(?:\x07|\x1b\\|\x9c)"
    r"|\x1b[ -/]*[0-~]"
)
#: C0 and C1 controls, what turns the direction of writing, line separators, lone surrogates.
_UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_MOST_CHARS = 500


def clean_text(text: str, *, colours: bool = False) -> str:
    """``text`` with its lines and tabs, and nothing that a terminal obeys.

    Escape sequences go; other controls, bidirectional overrides and lone surrogates are written
    out. ``colours``: those of a log stay, and end with the text.

    >>> clean_text("a\\x1b]0;title\\x07b \\x1b[31mred\\x1b[0m\\r\\n\\x08 \\u202e \\udcff")
    'ab red\\n\\\\x08 \\\\u202e \\\\udcff'
    """
    if text.isprintable():
        return text
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if not _UNSEEN.search(text):
        return text
    if not colours:
        return _UNSEEN.sub(_written_out, _SEQUENCE.sub("", text))
    parts: list[str] = []
    start, is_coloured = 0, False
    for found in _SEQUENCE.finditer(text):
        parts.append(_UNSEEN.sub(_written_out, text[start : found.start()]))
        start = found.end()
        if _COLOUR.match(found[0]):
            parts.append(found[0])
            is_coloured = True
    parts.append(_UNSEEN.sub(_written_out, text[start:]))
    return "".join(parts) + (_COLOUR_OFF if is_coloured else "")


def one_line(text: str, most: int = _MOST_CHARS) -> str:
    """`clean_text` on one line of ``most`` characters: for cells, names and messages.

    >>> one_line("two\\nlines\\t\\x1b[2J"), one_line("x" * 9, 4)
    ('two lines ', 'xxx…')
    """
    # Cut before as well: of a megabyte only the start is looked at.
    cleaned = clean_text(text[: 8 * most]).replace("\n", " ").replace("\t", " ")
    whole = len(cleaned) <= most and len(text) <= 8 * most
    return cleaned if whole else cleaned[: most - 1] + "…"


def json_text(text: str) -> str:
    """A JSON document with the same content in which nothing is left that a terminal obeys."""
    return _UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _written_out(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
