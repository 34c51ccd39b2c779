"""Starts of this user's runs that wait in the queue for GPUs, each known by its run's place."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from muster.base.settings import read_settings
from muster.run.folder import RunFolder, id_of

if TYPE_CHECKING:
    from muster.devices.tickets import Found

_LOOKS_PER_S = 5


def waiting_process(path: Path, *, by_name: bool = True) -> int | None:
    """The process in the queue for GPUs in which a start of this user's run waits that has, or will
    have, this folder. ``by_name``: also one by an earlier version, which says only the name.
    """
    wanted = id_of(path)
    for one in _waiting():
        is_named = "place" not in one.record and one.record.get("run") == path.name
        if one.record.get("place") == wanted or (by_name and is_named):
            return one.pid
    return None


def waiting_below(root: Path) -> list[tuple[str, int | None]]:
    """Name and process of each run that waits for GPUs and will have its folder below ``root``."""
    placed = [(root / str(one.record.get("run")), one) for one in _waiting()]
    waiting = [(path, one) for path, one in placed if one.record.get("place") == id_of(path)]
    return [(one.run, one.pid) for path, one in waiting if not RunFolder(path).exists()]


def process_to_end(path: Path) -> int | None:
    """As `waiting_process`, where a signal would reach that process: a container that shares the
    folder of leases gives its processes other numbers than this machine.
    """
    wanted = id_of(path)
    for one in _waiting():
        if one.record.get("place") == wanted and one.pid and _has_open(one.pid, one.path):
            return one.pid
    return None


def _has_open(pid: int, path: Path) -> bool:
    import psutil  # here: runs are seldom cancelled

    try:
        return os.path.realpath(path) in (file.path for file in psutil.Process(pid).open_files())
    except psutil.Error:
        return False


def _waiting() -> Sequence[Found]:
    folder = read_settings().lease_folder
    try:
        changed_ns = folder.stat().st_mtime_ns
    except OSError:  # nobody has waited so far
        return ()
    return _waiting_in(folder, changed_ns, int(_LOOKS_PER_S * time.monotonic()))


@lru_cache(maxsize=1)
def _waiting_in(folder: Path, changed_ns: int, moment: int) -> Sequence[Found]:
    """Read once for many runs, and again when one has come or gone, or may have been killed."""
    from muster.devices.tickets import own_uid, read_notes

    notes = read_notes(folder)
    return [one for one in notes if one.kind == "ticket" and one.uid == own_uid()]
