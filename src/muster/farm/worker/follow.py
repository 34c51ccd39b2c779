"""Forwards what a program writes to the file that ``MUSTER_METRICS`` names.

The file and the places where it was cut into frames outlive the attempt: the next one sends all
frames of an earlier attempt again as that attempt's, and the last one up to the file's end. A frame
is numbered by where it begins, so what the coordinator has is recorded once.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path

from muster.base.metric_log import is_mark, read_line
from muster.farm.metric_source import EventFiles, Printed
from muster.farm.metrics import encode
from muster.farm.worker.gather import SEND_AT, SEND_EVERY_S
from muster.farm.worker.inbox import Line
from muster.run.folder import RunFolder


class Follower:
    def __init__(self, folder: RunFolder, key: str, task_id: int, token: int, line: Line) -> None:
        folder.points.mkdir(parents=True, exist_ok=True)
        self.path = folder.points_of(key, token).absolute()
        self._earlier = [folder.points_of(key, number) for number in range(1, token)]
        self._task_id = task_id
        self._token = token
        self._line = line
        self._offset = 0
        self._num_lines = self._num_starts = 0
        self._complaints: set[str] = set()
        self._ended = threading.Event()
        self.sources: list[Printed | EventFiles] = []  # looked at as often as the file is
        self._thread = threading.Thread(target=self._follow, name="muster-metrics", daemon=True)

    def __enter__(self) -> Follower:
        for token, path in enumerate(self._earlier, 1):
            if path.exists():
                with self._forgiving():
                    self._send_again(token, path)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Forward the rest, also a last line without an end."""
        self._ended.set()
        self._thread.join()
        self._look(is_over=True)

    def _follow(self) -> None:
        while not self._ended.wait(SEND_EVERY_S):
            self._look(is_over=False)

    def _look(self, *, is_over: bool) -> None:
        for look in (self._forward, *(source.look for source in self.sources)):
            with self._forgiving():
                look(is_over=is_over)

    @contextmanager
    def _forgiving(self) -> Iterator[None]:
        """A task is not failed for numbers that cannot be read or sent: its log says so."""
        try:
            yield
        except Exception as error:  # of a library, or of a file that something else removes
            self._complain("numbers of this program were lost", f"{type(error).__name__}: {error}")

    def _forward(self, *, is_over: bool = False) -> None:
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return
        for part in _parts(data, is_over=is_over):
            start, end = self._offset, self._offset + len(part)
            with _cuts_of(self.path).open("ab", buffering=0) as cuts:
                cuts.write(b"%d\n" % end)  # its end, before it is sent
            self._offset = end
            with self._forgiving():
                self._send(self._token, start, part)

    def _send_again(self, token: int, path: Path) -> None:
        data = path.read_bytes()
        ends: list[int] = []
        with suppress(FileNotFoundError, ValueError):
            ends = [int(word) for word in _cuts_of(path).read_bytes().split()]
        self._num_lines = self._num_starts = 0
        for start, end in pairwise([0, *ends, len(data)]):
            for part in _by_start(data[start:end]):
                self._send(token, start, part)
                start += len(part)
        self._num_lines = self._num_starts = 0

    def _send(self, token: int, start: int, data: bytes) -> None:
        found: list[tuple[str, int, float, float]] = []
        now = time.time()
        for text in data.splitlines():
            if is_mark(text):
                self._num_lines, self._num_starts = 0, self._num_starts + 1
                continue
            line = read_line(text, self._num_lines)
            self._num_lines += 1
            if line is None:
                if text.strip():
                    shown = text[:80].decode("utf-8", "replace")
                    self._complain(
                        "a line of MUSTER_METRICS that holds no numbers is left out", shown
                    )
                continue
            step, time_s, numbers = line
            written_s = now if time_s is None else time_s
            found += [(name, step, written_s, value) for name, value in numbers.items()]
        if found:
            # Negative: these numbers count bytes and are not to be taken for those of `Gatherer`.
            self._line.logged(self._task_id, token, encode(found, self._num_starts), -1 - start)

    def _complain(self, what: str, detail: str) -> None:
        """Say it in the task's log, once."""
        if what not in self._complaints:
            self._complaints.add(what)
            with suppress(OSError):
                os.write(1, f"muster: {what}: {detail}\n".encode("utf-8", "replace"))


def _cuts_of(path: Path) -> Path:
    return path.with_suffix(".cuts")


def _parts(data: bytes, *, is_over: bool) -> Iterator[bytes]:
    """The whole lines of ``data``, some thousand at a time, and each part of one start."""
    lines = data.splitlines(keepends=True)
    if lines and not is_over and not lines[-1].endswith(b"\n"):
        lines.pop()
    for first in range(0, len(lines), SEND_AT):
        yield from _by_start(b"".join(lines[first : first + SEND_AT]))


def _by_start(data: bytes) -> Iterator[bytes]:
    """``data`` in parts that begin with the marks of new starts."""
    part: list[bytes] = []
    for line in data.splitlines(keepends=True):
        if part and is_mark(line):
            yield b"".join(part)
            part = []
        part.append(line)
    if part:
        yield b"".join(part)
