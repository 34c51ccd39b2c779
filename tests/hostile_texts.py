"""Texts that users, file names and programs bring, and that no outlet may obey or stumble over."""

from __future__ import annotations

import io
import re

HOSTILE: dict[str, str] = {
    "markup that closes": "x[/red]",
    "markup of a path": "saved [/data/ckpt]",
    "markup that opens": "[bold][link=http://e]x :smile:",
    "colours": "\x1b[31mred\x1b[0m",
    "cursor": "a\x1b[2J\x1b[10;10Hb\x1b[?25l",
    "title": "\x1b]0;pwned\x07 \x1b]8;;http://e\x1b\\link\x1b]8;;\x1b\\",
    "broken sequence": "\x1b]0;never ends \x1b[ \x1b",
    "c1": "\x9b2J\x9d0;t\x9c\x85\x90q\x9c",
    "c0": "bell\x07 back\x08\x08 cr\rover \x00nul\x7f",
    "bidi": "user\u202egnp.exe\u2066\u2069",
    "surrogate": "file\udcff.txt",
    "lines": "two\nlines\ttab\r\n\u2028x",
    "formula": "=cmd|' /C calc'!A0",
    "formula plus": "+1+1",
    "formula at": "@SUM(1)",
    "formula minus": "-2+3+cmd",
    "html": "<script>alert(1)</script><img src=x onerror=alert(1)>&amp;\"'",
    "braces": "{lr} {0} {} %s %(x)s",
    "emoji": "👩‍👩‍👧 é̸̡̛",
    "wide": "日本語",
    "long": "y" * 1_000_000,
    "comma and quote": 'a,b "c" ;d',
    "empty": "",
    "space": "  ",
}

#: What a terminal obeys, and what turns the text around it. Colours are looked at separately.
ORDERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
COLOUR = re.compile(r"\x1b\[[0-9;:]*m")


def orders_in(shown: str) -> list[str]:
    """What of ``shown`` a terminal would obey, other than line ends, tabs and colours."""
    return ORDERS.findall(COLOUR.sub("", shown))


class Terminal(io.StringIO):
    """A stream that says it is a terminal, with an encoding that a lone surrogate fails in."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        text.encode(self.encoding)
        return super().write(text)


_ESCAPED = re.compile(r"\\(?:\\|u(d[89a-f][0-9a-f]{2}))")


def unescape_surrogates(text: str) -> str:
    """The text of which `muster.farm.canonical.escape_surrogates` made ``text``."""
    if not re.search(r"\\ud[89a-f][0-9a-f]{2}", text):
        return text
    return _ESCAPED.sub(lambda found: chr(int(found[1], 16)) if found[1] else "\\", text)
