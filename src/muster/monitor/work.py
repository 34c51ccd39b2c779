"""Which run and task of muster a process belongs to, as far as the system tells.

A worker or rank writes into a log of its run's folder (``logs/worker-3.log``, ``logs/rank-0.log``),
and so does what it starts; the folder's last picture says which task a worker is at. Linux only;
processes of other users and of other containers are not seen.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from muster.monitor.sample import Work
from muster.run.folder import RunFolder

_LOG = re.compile(r"(?P<run>/.+)/logs/(?P<kind>worker|rank)-(?P<number>\d+)\.log")
#: A task's command may be started through a shell, a launcher and a data loader.
_MOST_ANCESTORS = 12


class _Place(NamedTuple):
    folder: RunFolder
    kind: str
    number: int


class WorkFinder:
    """Remembers what does not change: which run a process belongs to."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._known: dict[tuple[int, str], _Place | None] = {}

    def find(self, pids: Iterable[int]) -> dict[int, Work]:
        """The processes among ``pids`` that muster has started, directly or not."""
        if len(self._known) > 10_000:
            self._known.clear()
        live: dict[Path, dict[int, str]] = {}
        found: dict[int, Work] = {}
        for pid in pids:
            place = self._place(pid)
            if place is None:
                continue
            if place.kind == "rank":
                found[pid] = Work(place.folder.name, f"rank {place.number}")
                continue
            if place.folder.path not in live:
                live[place.folder.path] = tasks_by_pid(place.folder)
            tasks = live[place.folder.path]
            worker = next((p for p in self._ancestry(pid) if p in tasks), None)
            found[pid] = Work(place.folder.name, "" if worker is None else tasks[worker])
        return found

    def _place(self, pid: int) -> _Place | None:
        started = _started(self._proc, pid)
        if started is None:
            return None
        key = (pid, started)  # numbers are used again
        if key not in self._known:
            places = (place_of(self._proc, p) for p in self._ancestry(pid))
            self._known[key] = next((place for place in places if place is not None), None)
        return self._known[key]

    def _ancestry(self, pid: int) -> list[int]:
        line = [pid]
        while len(line) < _MOST_ANCESTORS:
            parent = _parent(self._proc, line[-1])
            if parent is None or parent <= 1:
                break
            line.append(parent)
        return line


def place_of(proc: Path, pid: int) -> _Place | None:
    """The run whose log is this process's standard output or error."""
    for descriptor in (1, 2):
        try:
            target = str((proc / str(pid) / "fd" / str(descriptor)).readlink())
        except OSError:
            continue
        match = _LOG.fullmatch(target)
        if match:
            folder = RunFolder(Path(match["run"]))
            if folder.exists():
                return _Place(folder, match["kind"], int(match["number"]))
    return None


def tasks_by_pid(folder: RunFolder) -> dict[int, str]:
    """Worker's pid → the task it was at a second ago, from the picture of a running sweep."""
    try:
        picture: Any = json.loads(folder.status_json.read_bytes())
        return {line["pid"]: line["task"] for line in picture["workers"] if line.get("pid")}
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return {}


def _stat(proc: Path, pid: int) -> list[str]:
    try:
        text = (proc / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return []
    # The command's name may hold spaces and parentheses: fields start after the last one.
    return text[text.rindex(")") + 2 :].split()


def _parent(proc: Path, pid: int) -> int | None:
    fields = _stat(proc, pid)
    return int(fields[1]) if fields else None


def _started(proc: Path, pid: int) -> str | None:
    fields = _stat(proc, pid)
    return fields[19] if fields else None
