"""Files that grow by lines: journals of what happened to a run, and logs that are followed."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from itertools import chain
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


_STEPS = ("train", "update")
#: Groups of steps that are held at most, and how many steps follow each other in one.
_MOST_GROUPS, _TOGETHER = 4000, 4


def lines_to_draw(path: Path) -> list[dict[str, Any]]:
    """The lines of a training's ``metrics.jsonl``, steps before all else; torn ones are left out.

    Of more than 16,000 steps it is some, so that memory does not grow with them: the last, and
    evenly spread groups of steps that follow each other, from which speeds can be told.
    """
    groups: list[list[dict[str, Any]]] = []
    others: list[dict[str, Any]] = []
    last: list[dict[str, Any]] = []
    every, number = 1, 0
    for line in read_journal(path):
        if line.get("kind") not in _STEPS:
            if isinstance(line.get("kind"), str):
                others.append(line)
            continue
        group, place = divmod(number, _TOGETHER)
        number, last = number + 1, [line]
        if group % every == 0:
            if place == 0:
                if len(groups) == _MOST_GROUPS:
                    del groups[1::2]
                    every *= 2
                groups.append([])
            groups[-1].append(line)
    if groups and groups[-1][-1] is not last[0]:
        groups.append(last)
    return [*chain.from_iterable(groups), *others]


_CHUNK = 1 << 20


class Tail:
    """New lines of one file, from ``start`` or else from where it ended when this was made.

    ``hidden_from``: the byte from which on nothing is to be heard for now, None for no limit. It is
    asked after every read, so it must be known before that byte is written.
    """

    def __init__(
        self,
        path: Path,
        hear: Callable[[str], None],
        hidden_from: Callable[[], int | None] = lambda: None,
        *,
        start: int | None = None,
    ) -> None:
        self._path = path
        self._hear = hear
        self._hidden_from = hidden_from
        self._rest: list[bytes] = []
        size = path.stat().st_size if path.exists() else 0
        self._position = size if start is None else start
        self.start = self._position

    def read(self, *, is_last: bool = False, until: int | None = None) -> None:
        """Hand on the whole lines since the last call; ``is_last``: also one without an end;
        ``until``: those before this byte, whatever is hidden.
        """
        while data := self._new(until):
            if b"\n" not in data:
                self._keep(data)
                continue
            *lines, rest = b"".join((*self._rest, data)).split(b"\n")
            self._rest = []
            self._keep(rest)
            for line in lines:
                self._hear(_text(line))
        if is_last and (rest := b"".join(self._rest)):
            self._rest = []
            self._hear(_text(rest))

    def _keep(self, data: bytes) -> None:
        """Keep what may be the begin of a line, in parts: a program may print megabytes without an
        end. Of a progress bar, which writes over what it has written, only the last counts.
        """
        seen_from = data.rstrip(b"\r").rfind(b"\r")
        if seen_from >= 0 or (self._rest and self._rest[-1].endswith(b"\r") and data.strip(b"\r")):
            self._rest, data = [], data[max(0, seen_from) :]
        self._rest.append(data)

    def skip_to(self, position: int, hidden_from: int | None = None) -> None:
        """Hear what is left before ``hidden_from`` or else ``position``, then go on from there."""
        self.read(is_last=True, until=position if hidden_from is None else hidden_from)
        self._position = self.start = position

    def _new(self, until: int | None) -> bytes:
        try:
            with self._path.open("rb") as file:
                file.seek(self._position)
                data = file.read(_CHUNK)
        except OSError:  # not written yet
            return b""
        limit = self._hidden_from() if data and until is None else until
        if limit is not None:
            data = data[: max(0, limit - self._position)]
        self._position += len(data)
        return data


def last_lines(
    path: Path, count: int, *, start: int = 0, end: int | None = None
) -> tuple[str, ...]:
    """The last lines of a file that say something, all of them between bytes ``start`` and
    ``end``.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            size = size if end is None else min(size, end)
            first = max(start, size - 160 * max(count, 50))
            file.seek(first)
            data = file.read(max(0, size - first))
    except OSError:
        return ()
    lines = [_text(line) for line in data.split(b"\n") if line.strip()]
    return tuple(lines[-count:])


def _text(line: bytes) -> str:
    """What a terminal would show in the end of a line that a progress bar has rewritten."""
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode("utf-8", "replace")
