"""How far each tracker has got, in the run folder.

A line is added when a tracker has accepted a batch, in one write: a kill leaves the line or does
not, and in the second case the tracker is asked what it has.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from muster.base.atomic_files import replacing
from muster.base.errors import SetupError
from muster.base.journal import read_journal

#: The exit code of a process that has sent everything, which no accident gives.
DONE = 100


class Position:
    """A context that holds the tracker's place: two processes would send everything twice.

    ``mark``: what the source said after the last batch that was accepted, None before any;
    ``ended``: of what the end was told, as the source names it; ``begun``: of which tasks the
    tracker has a run that has not ended. All begin anew for another ``run_id``, that of a copied
    folder.
    """

    def __init__(self, path: Path, run_id: str) -> None:
        self.mark: Any = None
        self.ended: set[tuple[int, int]] = set()
        self.begun: set[int] = set()
        self._path = path
        self._run_id = run_id
        self._line = _Line()
        self._saved: Any = None

    def __enter__(self) -> Self:
        import fcntl

        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self._path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise Held(f"Another process is sending this run to {self._path.stem}.") from None
        self.mark, self.ended, self.begun = read_position(self._path, self._run_id)
        self._saved = self.mark
        # Written anew: a long run leaves many lines, of which the last one and the ends matter.
        self._line = _Line(ended=sorted(self.ended), begun=sorted(self.begun))
        with replacing(self._path) as beside:
            beside.write_bytes(self._take_line())
        self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)
        os.close(self._lock)

    def begin(self, task: int) -> None:
        if task not in self.begun:
            self.begun.add(task)
            self._line.begun.append(task)

    def rest(self, task: int) -> None:
        """It has ended, or goes on another day."""
        self.begun.discard(task)
        self._line.rested.append(task)

    def end(self, key: tuple[int, int]) -> None:
        self.ended.add(key)
        self._line.ended.append(key)

    def save(self) -> None:
        if self.mark != self._saved or self._line != _Line():
            os.write(self._file, b"\n" + self._take_line())

    def _take_line(self) -> bytes:
        line, self._line, self._saved = self._line, _Line(), self.mark
        return json.dumps({"run": self._run_id, "mark": self.mark, **asdict(line)}).encode() + b"\n"


@dataclass
class _Line:
    """What has changed since the last line."""

    ended: list[tuple[int, int]] = field(default_factory=list)
    begun: list[int] = field(default_factory=list)
    rested: list[int] = field(default_factory=list)


class Held(SetupError):
    """Another process has the tracker's place."""


def read_position(path: Path, run_id: str) -> tuple[Any, set[tuple[int, int]], set[int]]:
    """The mark, the ends and what has begun, as far as they are of ``run_id``. Changes nothing."""
    mark: Any = None
    ended: set[tuple[int, int]] = set()
    begun: set[int] = set()
    for line in read_journal(path):
        if line.get("run") == run_id:
            mark = line.get("mark")
            ended |= {(int(task), int(token)) for task, token in line.get("ended", ())}
            begun = (begun | set(line.get("begun", ()))) - set(line.get("rested", ()))
    return mark, ended, begun
