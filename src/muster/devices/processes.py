"""Whose process a pid is: the driver knows only its number."""

from __future__ import annotations

import sys
from pathlib import Path

_COMMAND_CHARS = 120


def owner_of(pid: int) -> str | None:
    """The user name behind ``pid`` (the number where it has no name), None if it is not seen.

    A process of another container is not seen, nor is any on systems without /proc.
    """
    if sys.platform == "win32":
        return None
    import pwd

    try:
        uid = Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return None
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def command_of(pid: int) -> str | None:
    """The beginning of the command line of ``pid``, None if it is not seen."""
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return None
    text = raw.decode(errors="replace").replace("\0", " ").strip()
    if len(text) > _COMMAND_CHARS:
        text = text[: _COMMAND_CHARS - 1] + "…"
    return text or None
