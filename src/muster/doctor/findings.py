"""What the doctor says: findings with a severity, the exit code, and a file of repairs."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

Severity = Literal["ok", "note", "warning", "error"]
#: From good to bad.
SEVERITIES: tuple[Severity, ...] = ("ok", "note", "warning", "error")

EXIT_HEALTHY = 0
EXIT_WARNINGS = 1
EXIT_BROKEN = 2


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What a check has found: ``what`` was seen, ``why`` it matters, and how to ``fix`` it.

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


note = partial(Finding, severity="note")
warning = partial(Finding, severity="warning")
error = partial(Finding, severity="error")


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


_HEAD = """\
# Written by `muster doctor --fix env` for {host}. Use it with: source {name}
# It changes this shell only. Delete a line to leave that setting as it is.
"""


def env_script(findings: Sequence[Finding], host: str, name: str) -> str:
    """The shell file: an export or a command per repair, each with the finding it is for.

    Of two findings that set the same variable the first counts: it is the worse one.
    """
    lines = [_HEAD.format(host=host or "this host", name=name)]
    seen: set[str] = set()
    for finding in findings:
        repairs = [
            f"export {key}={shlex.quote(value)}"
            for key, value in finding.settings.items()
            if key not in seen
        ]
        repairs += [command for command in finding.commands if command not in seen]
        if not repairs:
            continue
        seen |= {*finding.settings, *finding.commands}
        # A finding may quote an error of several lines, and none may leave its comment.
        lines.append(f"# {' '.join(finding.what.split())}")
        lines += [*repairs, ""]
    if len(lines) == 1:
        lines.append("# Nothing to set: no finding has a repair by variable.")
    return "\n".join(lines).rstrip() + "\n"
