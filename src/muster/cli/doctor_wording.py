"""The doctor's findings as lines of text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from muster.base.clock import human_duration
from muster.doctor.findings import SEVERITIES, Finding

_WORDS = {"ok": "ok", "note": "note", "warning": "WARNING", "error": "ERROR"}
_LABEL_WIDTH = 9


def finding_lines(findings: Sequence[Finding], width: int | None) -> list[str]:
    """The worst last, where a terminal shows it; ``width`` None: nothing is broken into lines.

    >>> finding_lines([Finding(severity="note", what="A.", fix="B", check="c")], None)
    ['note     c: A.', '         fix: B']
    """
    lines = []
    for severity in SEVERITIES:
        for finding in findings:
            if finding.severity == severity:
                lines += _lines_of(finding, width)
    return lines


def _lines_of(finding: Finding, width: int | None) -> list[str]:
    label = _WORDS[finding.severity].ljust(_LABEL_WIDTH)
    lines = _wrapped(f"{label}{finding.check}: {_one_line(finding.what)}", width)
    for name, text in (("why", finding.why), ("fix", finding.fix)):
        if text:
            lines += _wrapped(f"{' ' * _LABEL_WIDTH}{name}: {_one_line(text)}", width)
    return lines


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _wrapped(text: str, width: int | None) -> list[str]:
    if width is None:
        return [text]
    indent = " " * (_LABEL_WIDTH + 2)
    # Paths and addresses stay whole, so that they can be copied.
    return textwrap.wrap(
        text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def summary(findings: Iterable[Finding], seconds: float) -> str:
    """``2 errors, 1 warning, 3 notes, 20 in order; 12.3 s``."""
    counts = dict.fromkeys(SEVERITIES, 0)
    for finding in findings:
        counts[finding.severity] += 1
    parts = [
        f"{counts[name]} {name}{'s' if counts[name] > 1 else ''}"
        for name in ("error", "warning", "note")
        if counts[name]
    ]
    parts.append(f"{counts['ok']} in order")
    verdict = "broken" if counts["error"] else "healthy"
    return f"{verdict}: {', '.join(parts)}; {human_duration(seconds)}"
