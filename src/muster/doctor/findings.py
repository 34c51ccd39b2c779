"""What the doctor says: findings with a severity, and the exit code they come to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

Severity = Literal["ok", "note", "warning", "error"]
#: From good to bad.
SEVERITIES: tuple[Severity, ...] = ("ok", "note", "warning", "error")

EXIT_HEALTHY = 0
EXIT_WARNINGS = 1
EXIT_BROKEN = 2


@dataclass(frozen=True, kw_only=True)
class Finding:
    """``what`` was seen, ``why`` it matters, ``fix``: what to do about it.

    ``settings``: environment variables that repair it or work around it, for ``--fix env``.
    ``commands``: shell commands that a sourced file can run to the same end (``ulimit``).
    ``check``: the name of the check, filled in by the table of checks.
    """

    severity: Severity
    what: str
    why: str = ""
    fix: str = ""
    settings: dict[str, str] = field(default_factory=dict)
    commands: tuple[str, ...] = ()
    check: str = ""


def ok(what: str) -> Finding:
    return Finding(severity="ok", what=what)


def exit_code(findings: Iterable[Finding], *, strict: bool) -> int:
    """0 healthy, 1 warnings where ``strict``, 2 broken.

    >>> exit_code([ok("fine"), Finding(severity="warning", what="slow")], strict=False)
    0
    """
    seen = {finding.severity for finding in findings}
    if "error" in seen:
        return EXIT_BROKEN
    return EXIT_WARNINGS if strict and "warning" in seen else EXIT_HEALTHY


def sorted_by_severity(findings: Iterable[Finding]) -> list[Finding]:
    """The worst first; equal ones stay in the order of the checks."""
    return sorted(findings, key=lambda finding: -SEVERITIES.index(finding.severity))
