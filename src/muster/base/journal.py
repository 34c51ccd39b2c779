"""Append-only JSON lines: what happened to a run, for people and programs that look later."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from muster.base.clock import Clock, iso_utc

#: What happens in a run, one message each, as it happens; silent unless somebody asks for it.
EVENTS = logging.getLogger("muster.events")


class Journal:
    """One writer appends whole lines; a reader skips torn ones."""

    def __init__(self, path: Path, clock: Clock) -> None:
        self._file = path.open("a+b", buffering=0)
        self._clock = clock
        self._is_torn = not _ends_whole(self._file)

    def write(self, event: str, **fields: Any) -> None:
        EVENTS.debug("%s %s", event, fields)
        line = {"time": iso_utc(self._clock.wall_s()), "event": event, **fields}
        text = (json.dumps(line, ensure_ascii=False) + "\n").encode("utf-8", "replace")
        # What a killed writer or a full disk has left must not swallow this line.
        text = b"\n" + text if self._is_torn else text
        self._is_torn = True
        self._is_torn = self._file.write(text) != len(text)

    def close(self) -> None:
        self._file.close()


def _ends_whole(file: IO[bytes]) -> bool:
    if not file.seek(0, os.SEEK_END):
        return True
    file.seek(-1, os.SEEK_END)
    return file.read(1) == b"\n"


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
