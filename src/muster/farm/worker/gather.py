"""A worker gathers the points that a task logs, or that a program writes to the file which
``MUSTER_METRICS`` names, and sends them a few times a second.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from muster.base.errors import TargetError
from muster.base.metric_log import PROCESS, as_number, as_step, is_mark, read_line
from muster.farm.metrics import POINT, EventFiles, Printed, decode, encode, join
from muster.farm.worker.inbox import Line
from muster.run.folder import RunFolder

SEND_EVERY_S = 0.5
#: How long an attempt waits at a rung. Files in a shared folder take seconds to appear.
_DECISION_S, _LOOK_S = 30.0, 0.001
#: This many points are sent at once, before the time is up.
SEND_AT = 4096


class Gatherer:
    """The points of one attempt.

    They leave in the order in which they were logged, at the latest ``SEND_EVERY_S`` after that.
    Its methods may be called from any thread of this process.
    """

    def __init__(self, task_id: int, token: int, line: Line, pid: int | None = None) -> None:
        """``pid``: the process of the attempt, the only one that may log; None: this one."""
        self._task_id = task_id
        self._token = token
        self._line = line
        self._lock = threading.Lock()
        self._names: dict[str, int] = {}
        self._packed = bytearray()
        self._sent: deque[tuple[int, bytes]] = deque()  # serial and body, not yet confirmed
        self._thread: threading.Thread | None = None
        self._ended: threading.Event | None = None  # made with the thread: most tasks log nothing
        self._pid = os.getpid() if pid is None else pid
        self._start = 0  # how often the attempt had begun anew
        self._others: Sequence[Gatherer] = ()  # whose points leave with these
        self._leaves_alone = True

    def begin_anew(self, start: int, others: Sequence[Gatherer] | None) -> None:
        """``start``: how often the attempt had begun before. ``others``: whose points leave with
        these; None: these leave with those of another.
        """
        self._start = start
        self._others = others or ()
        self._leaves_alone = others is not None

    def add(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Log these numbers, all of them or, with a TargetError, none."""
        if os.getpid() != self._pid:
            raise TargetError(
                "ctx.log was called in a process that the task has started.",
                hint="send the numbers to the task's own process, and log them there.",
            )
        number = as_step(step)
        numbers = [(name, as_number(name, value)) for name, value in metrics.items()]
        now = time.time()
        with self._lock:
            for name, value in numbers:
                if self._start and not self._packed:  # each frame says it
                    self._packed += POINT.pack(0, 0, 0.0, self._start)
                    self._names[PROCESS] = 0
                which = self._names.setdefault(name, len(self._names))
                self._packed += POINT.pack(which, number, now, value)
                if len(self._packed) >= SEND_AT * POINT.size:
                    self._send()
            if self._thread is None and self._leaves_alone:
                self._ended = threading.Event()
                self._thread = threading.Thread(
                    target=self._send_regularly,
                    args=(self._ended,),
                    name="muster-metrics",
                    daemon=True,
                )
                self._thread.start()

    def flush(self) -> None:
        """Send what has been logged so far."""
        with self._lock:
            self._send()

    def settle(self) -> None:
        """Send what has been logged, and wait until the coordinator has recorded it and said what
        it decided: half a minute at most, for the coordinator may be restarting.
        """
        self.flush()
        if not self._line.confirms_meanwhile:
            return
        serial = self._sent[-1][0] if self._sent else 0
        given_up = time.monotonic() + _DECISION_S
        while self._line.confirmed() < serial and time.monotonic() < given_up:
            time.sleep(_LOOK_S)

    def unconfirmed(self) -> list[bytes]:
        """The bodies that were sent and that the coordinator has not confirmed."""
        with self._lock:
            self._forget_confirmed()
            return [body for _, body in self._sent]

    def send_again(self, bodies: list[bytes]) -> None:
        """Send points of an earlier attempt, or of a call that failed, as this one's."""
        with self._lock:
            for body in bodies:
                self._post(encode(decode(body).rows(), self._start))

    def end(self) -> None:
        """Send the rest and let the thread end; nothing may be logged afterwards."""
        if self._ended is not None:
            self._ended.set()
        self.flush()
        if self._thread is not None:
            self._thread.join()

    def _send_regularly(self, ended: threading.Event) -> None:
        while not ended.wait(SEND_EVERY_S):
            for gatherer in (self, *self._others):
                gatherer.flush()

    def _send(self) -> None:
        if self._packed:
            self._post(join(self._names, bytes(self._packed)))
            self._names.clear()
            self._packed.clear()

    def _post(self, body: bytes) -> None:
        self._forget_confirmed()
        self._sent.append((self._line.logged(self._task_id, self._token, body), body))

    def _forget_confirmed(self) -> None:
        confirmed = self._line.confirmed()
        while self._sent and self._sent[0][0] <= confirmed:
            self._sent.popleft()


class JointGatherer:
    """The points of all tasks that one call computes. One thread sends them.

    ``start``: how many calls of the same attempts have failed before. What this one logs replaces
    what they have logged.
    """

    def __init__(self, gatherers: Sequence[Gatherer], start: int) -> None:
        self._gatherers = gatherers
        first, *others = gatherers
        first.begin_anew(start, others)
        for gatherer in others:
            gatherer.begin_anew(start, None)

    def add(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Log these numbers, one for each task or one for all; or, with a TargetError, none."""
        count = len(self._gatherers)
        columns = {name: _column(name, value, count) for name, value in metrics.items()}
        for i, gatherer in enumerate(self._gatherers):
            gatherer.add(step, {name: column[i] for name, column in columns.items()})


def _column(name: str, value: Any, count: int) -> list[float]:
    if len(getattr(value, "shape", ())) == 1:
        value = value.tolist()
    if not isinstance(value, list | tuple):
        return [as_number(name, value)] * count
    if len(value) != count:
        raise TargetError(
            f"log: {name} has {len(value)} numbers, but this call computes {count} tasks.",
            hint="log one number for each task, in the order of their parameters, or one for all.",
        )
    return [as_number(name, item) for item in value]


class Follower:
    """Forwards what a program writes to the file that ``MUSTER_METRICS`` names.

    The file and the places where it was cut into frames outlive the attempt: the next one sends all
    frames of an earlier attempt again as that attempt's, and the last one up to the file's end. A
    frame is numbered by where it begins, so what the coordinator has is recorded once.

    A context: on leaving it the rest is forwarded, also a last line without an end. Until then
    whoever waits for the program calls ``look`` twice a second, or else a thread does.
    """

    def __init__(self, folder: RunFolder, key: str, task_id: int, token: int, line: Line) -> None:
        #: The file that the program writes. A text: a Path costs as much as what is done with it.
        self.place = f"{_points_of(folder)}/{key}.{token}.jsonl"
        self._earlier = [folder.points_of(key, number) for number in range(1, token)]
        self._task_id = task_id
        self._token = token
        self._line = line
        self._offset = 0
        self._num_lines = self._num_starts = 0
        self._complaints: set[str] = set()
        self._ended: threading.Event | None = None  # made with the thread
        self._thread: threading.Thread | None = None
        self.sources: list[Printed | EventFiles] = []  # looked at as often as the file is
        self.last: dict[str, float] = {}  # of this attempt, and not what the sources have

    @property
    def path(self) -> Path:
        return Path(self.place)

    def __enter__(self) -> Follower:
        for token, path in enumerate(self._earlier, 1):
            if path.exists():
                with self._forgiving():
                    self._send_again(token, path)
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is not None and self._ended is not None:
            self._ended.set()
            self._thread.join()
        self.look(is_over=True)

    def look_regularly(self) -> None:
        """Have a thread look, where nobody waits for the program."""
        if self._thread is None:
            self._ended = threading.Event()
            thread = threading.Thread(
                target=self._follow, args=(self._ended,), name="muster-metrics", daemon=True
            )
            with suppress(RuntimeError):  # no room for a thread: all is forwarded at the end
                thread.start()
                self._thread = thread

    def _follow(self, ended: threading.Event) -> None:
        while not ended.wait(SEND_EVERY_S):
            self.look()

    def look(self, *, is_over: bool = False) -> None:
        """Forward what has been written since the last time."""
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
            with open(self.place, "rb") as file:  # noqa: PTH123
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
            if token == self._token:
                self.last.update(numbers)
        if found:
            # Negative: these numbers count bytes and are not to be taken for those of `Gatherer`.
            self._line.logged(self._task_id, token, encode(found, self._num_starts), -1 - start)

    def _complain(self, what: str, detail: str) -> None:
        """Say it in the task's log, once."""
        if what not in self._complaints:
            self._complaints.add(what)
            with suppress(OSError):
                os.write(1, f"muster: {what}: {detail}\n".encode("utf-8", "replace"))


def _points_of(folder: RunFolder) -> str:
    """The folder of these files, which is made where it is not there."""
    path = os.path.abspath(folder.points)
    if not os.path.isdir(path):  # noqa: PTH112
        os.makedirs(path, exist_ok=True)  # noqa: PTH103
    return path


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
