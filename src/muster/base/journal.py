"""Append-only JSON lines: what happened to a run, for people and programs that look later."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from muster.base.clock import Clock, iso_utc


class Journal:
    """One writer appends whole lines; a reader skips a torn last line."""

    def __init__(self, path: Path, clock: Clock) -> None:
        self._file = path.open("a", encoding="utf-8")
        self._clock = clock

    def write(self, event: str, **fields: Any) -> None:
        line = {"time": iso_utc(self._clock.wall_s()), "event": event, **fields}
        self._file.write(json.dumps(line, ensure_ascii=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_journal(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a journal, oldest first; a missing file has none."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict):
                yield record
