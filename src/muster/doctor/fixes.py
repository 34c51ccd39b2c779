"""``--fix env``: what findings would set, as a file for the shell to source."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from muster.base.atomic_files import write_atomic
from muster.doctor.findings import Finding

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


def write_env_script(path: Path, findings: Sequence[Finding], host: str) -> None:
    """Replace ``path``; raises OSError where that fails."""
    write_atomic(path, env_script(findings, host, path.name).encode())
