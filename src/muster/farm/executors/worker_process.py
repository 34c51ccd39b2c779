"""A worker as a process of this machine: how it is started, the stream to it, how it has ended."""

from __future__ import annotations

import functools
import importlib.util
import json
import mmap
import os
import shutil
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from muster.base.errors import SetupError, UsageError
from muster.base.metric_log import METRICS_FILE
from muster.base.modules import FINDER, Interpreter
from muster.base.processes import KILL, RUN_MARKER, out_of_memory_kills, signal_group
from muster.base.settings import (
    CHECKPOINT_DIR,
    TASK_DIR,
    WORKERS_PER_GPU,
    child_environment,
    waiting_threads,
)
from muster.farm import canonical, held_results, wire
from muster.farm.events import (
    Divided,
    Event,
    Logged,
    Progress,
    Results,
    Returned,
    TargetBroken,
    WorkerReady,
)
from muster.farm.executors.memory_limits import MemoryGroup, MemoryWatch
from muster.farm.outcomes import signal_name
from muster.farm.task import Finished, SlotSpec, end_of

#: How much of a dead worker's last output is kept.
TRACE_BYTES = 4096

_CHUNK = 1 << 18
_TASK_AND_TOKEN, _LOG_END = itemgetter(0, 1), attrgetter("log_end")


class Channel:
    """The coordinator's end of the stream to a worker: never blocks, whatever the worker does.

    ``want_write`` is called with True when bytes wait to be sent, False when all are sent.
    """

    def __init__(self, connection: socket.socket, want_write: Callable[[bool], None]) -> None:
        connection.setblocking(False)
        self.socket = connection
        self._want_write = want_write
        self._incoming = bytearray()
        self._outgoing = bytearray()

    def send(self, data: bytes) -> None:
        if self._outgoing:
            self._outgoing += data
            return
        sent = self._try_send(data)
        if sent < len(data):
            self._outgoing += data[sent:]
            self._want_write(True)

    def flush(self) -> None:
        """Send what waits, now that the socket takes bytes again."""
        sent = self._try_send(bytes(self._outgoing))
        del self._outgoing[:sent]
        if not self._outgoing:
            self._want_write(False)

    def receive(self) -> list[tuple[list[Any], bytes]]:
        """Return every whole frame that has arrived; a closed or broken stream has no more."""
        while True:
            try:
                data = self.socket.recv(_CHUNK)
            except (BlockingIOError, ConnectionError):
                break
            self._incoming += data
            if len(data) < _CHUNK:
                break
        return list(wire.unpack(self._incoming))

    def close(self) -> None:
        self.socket.close()

    def _try_send(self, data: bytes) -> int:
        try:
            return self.socket.send(data)
        except BlockingIOError:
            return 0
        except OSError:
            return len(data)  # the worker is dying; its death is reported elsewhere


_WORK = """
import muster.farm.worker.main as worker
from muster.base import modules
modules.bring_to_children(ours)
sys.exit(worker.main(sys.argv[1:]))
"""
#: An editable install is a folder on the path, or a finder that maps names of modules to places.
_TELL = """
import json, os, sysconfig
import muster.farm.worker.main
from muster.run.record import environment
maps = [getattr(sys.modules.get(one.__module__), "MAPPING", {}) for one in sys.meta_path
        if isinstance(one, type)]
places = [os.path.dirname(place) for names in maps for place in names.values()]
path = [os.path.abspath(place) for place in [*sys.path[1:], *places]]
print(json.dumps([environment(), path, sysconfig.get_path("stdlib")]))
"""


class WorkerPython(NamedTuple):
    """What workers find in an interpreter: the versions of packages, and the modules."""

    versions: Mapping[str, str]
    modules: Interpreter


def interpreter(place: Path) -> str:
    """The program that ``--python`` means: itself, or that of an environment's folder."""
    if place.is_dir():
        return str((place / "bin" / "python").absolute())
    if place.parts[1:] or place.is_file():  # a Path of `./python3` has no `./` any more
        return str(place.absolute())
    return shutil.which(place) or str(place)


@functools.cache
def worker_python(place: Path) -> WorkerPython:
    """What workers find in that interpreter; UsageError where it is none, SetupError
    where no worker can run there.
    """
    python, reason = interpreter(place), ["it printed nothing"]
    try:
        told = subprocess.run(
            _in(python, _TELL), capture_output=True, text=True, timeout=120, check=False
        )
        if told.returncode == 0:
            versions, path, library = json.loads(told.stdout.strip().splitlines()[-1])
            return WorkerPython(versions, Interpreter(tuple(path), library))
        reason = told.stderr.strip().splitlines()[-1:] or [f"exit code {told.returncode}"]
    except (ValueError, IndexError):
        pass  # it ended well and printed nothing
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = [str(error)]
    hint = "name a Python 3.11 or newer, or an environment's folder"
    if not _is_python(python):
        raise UsageError(
            f"--python {place} is not a Python interpreter: {reason[0]}.", hint=f"{hint}."
        )
    raise SetupError(
        f"--python {place} cannot run workers: {reason[0]}.",
        hint=f"{hint}; what is missing there: {python} -m pip install orjson",
    )


def _is_python(program: str) -> bool:
    try:
        words = [program, "-c", "print(6 * 7)"]
        told = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return False
    return told.stdout.strip() == "42"


def _in(python: str, code: str) -> list[str]:
    """The command that runs ``code`` in that interpreter, after Muster was imported."""
    specs = [importlib.util.find_spec(name) for name in ("muster", "orjson")]
    origins = [Path(spec.origin) for spec in specs if spec is not None and spec.origin]
    places = list(dict.fromkeys(str(origin.parents[1]) for origin in origins))
    return [python, "-c", f"ours = {places!r}\n{FINDER}{code}"]


class Begun(NamedTuple):
    """A process that waits to be told what it is to do, our end of its channel, and where its
    results wait. ``slot``: whose environment it has.
    """

    slot: SlotSpec
    process: subprocess.Popen[bytes]
    socket: socket.socket
    memory: mmap.mmap | None

    def end(self) -> None:
        """End it: it is not needed, and has begun nothing."""
        if self.process.poll() is None:  # else its number may be another's by now
            signal_group(self.process.pid, KILL)
            self.process.wait()
        self.socket.close()
        if self.memory is not None:
            self.memory.close()


def begin_worker(
    slot: SlotSpec, mark: str, output: int, lifeline: int,
    python: Path | None = None, ahead: str = "",
) -> Begun:  # fmt: skip
    """Start a process for a worker of ``slot``; see `start_worker`. It imports nothing of the
    user's before it is set up. ``mark``: see `environment_of`.
    """
    ours, theirs = socket.socketpair()
    memory = held_results.make()
    try:
        with theirs:
            environment = environment_of(slot, mark)
            process = start_worker(theirs, output, lifeline, environment, python, memory, ahead)
    except BaseException:
        ours.close()
        if memory is not None:
            os.close(memory)
        raise
    return Begun(slot, process, ours, None if memory is None else held_results.share(memory))


def start_worker(
    theirs: socket.socket, log: int, lifeline: int, environment: Mapping[str, str],
    python: Path | None = None, memory: int | None = None, ahead: str = "",
) -> subprocess.Popen[bytes]:  # fmt: skip
    """The process of a worker that prints to ``log``, speaks on ``theirs`` and dies with whoever
    holds the other end of ``lifeline``. ``python``: another interpreter than this one. ``memory``:
    where its results may wait, see `held_results`. ``ahead``: a module to import before it is set
    up; it opens its log itself then.
    """
    argv = [sys.executable, "-P", "-m", "muster.farm.worker.main"]
    if python is not None:
        argv = _in(interpreter(python), _WORK)
    settings: dict[str, Any] = {"stdout": log, "stderr": log, "env": environment}
    if sys.platform == "win32":
        argv += ["PLACE", str(os.getpid())]
        return _start_on_windows(argv, theirs, settings)
    passed = [theirs.fileno(), lifeline, *([] if memory is None else [memory])]
    argv += [
        str(passed[0]),
        str(os.getpid()),
        str(lifeline),
        "-" if memory is None else str(memory),
    ]
    if ahead:
        argv.append(ahead)
    return subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        pass_fds=passed,
        start_new_session=True,
        **settings,
    )


def _start_on_windows(
    argv: list[str], theirs: socket.socket, settings: dict[str, Any]
) -> subprocess.Popen[bytes]:
    """A socket can only be shared with a process that exists: it travels on standard input.

    Written after the documentation of ``socket.share``; not run on Windows so far.
    """
    argv[-2] = "372"  # the size of a WSAPROTOCOL_INFOW structure
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, **settings)
    assert process.stdin is not None
    share = getattr(theirs, "share")  # noqa: B009  (exists on Windows only)
    process.stdin.write(share(process.pid))
    process.stdin.close()
    return process


def environment_of(slot: SlotSpec, mark: str) -> dict[str, str]:
    """A worker sees the devices of its slot, and no more threads than its share of cores.

    ``mark``: by which it and its descendants are found again.
    """
    threads = str(slot.num_threads)
    values = {
        RUN_MARKER: mark,
        # In a sweep inside a task of another one they would be that task's.
        **dict.fromkeys((TASK_DIR, CHECKPOINT_DIR, METRICS_FILE), ""),
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": threads,
        "NUMEXPR_NUM_THREADS": threads,
        **waiting_threads(),
    }
    if slot.visible_devices is not None:
        values["CUDA_VISIBLE_DEVICES"] = slot.visible_devices
        values["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        values[WORKERS_PER_GPU] = str(slot.num_sharing)
    return child_environment(values)


def reason_of(code: int, left: list[int]) -> str:
    text = f"ended with exit code {code}" if code >= 0 else f"was ended by {signal_name(-code)}"
    if left:
        text += f"; its processes {left} cannot be killed and may still hold the device"
    return f"the worker process {text}"


def log_tail(log: str, start: int) -> str:
    """The last output since the last finished task: often the only trace of a crash."""
    with open(log, "rb") as file:  # noqa: PTH123
        size = file.seek(0, os.SEEK_END)
        file.seek(max(start, size - TRACE_BYTES))
        return file.read(TRACE_BYTES).decode("utf-8", "replace")


@dataclass
class Worker:
    worker_id: int
    slot: SlotSpec
    process: subprocess.Popen[bytes]
    channel: Channel
    log: str
    pidfd: int = -1
    kill_at: float | None = None
    was_killed: bool = False
    ooms_before: int = 0
    tasks_end: int = 0
    unfit: str = ""  # why it cannot compute on them, by its own account
    watch: MemoryWatch | None = None
    group: MemoryGroup | None = None  # in place of a watch, where one can be had
    took: str = ""  # more memory than it may, so that it was killed
    looked_s: float = 0.0  # when the look began that shows how much it holds, in Unix time
    ended_s: float = 0.0  # when its last task ended, as far as that was looked for
    spare_at: float | None = None  # when the process of the next worker is started beside it
    memory: mmap.mmap | None = None  # where its results wait
    # Task and token of the last results that it has sent: as many as may have waited together.
    recent: deque[tuple[int, int]] = field(
        default_factory=lambda: deque(maxlen=held_results.MOST_FRAMES)
    )

    @property
    def is_of_past(self) -> bool:
        """Whether a task has ended since that look, whenever its result was heard of."""
        return self.ended_s > self.looked_s

    def met_no_memory(self) -> bool:
        """Whether the kernel has ended something for lack of memory, as far as it tells of us."""
        if self.group is not None:
            return self.group.was_hit
        return out_of_memory_kills() > self.ooms_before

    def _unsent(self) -> Iterator[tuple[list[Any], bytes]]:
        """Of a worker that is gone: results that waited, without those that it had just sent."""
        if self.memory is not None:
            for frame in wire.unpack(bytearray(held_results.left_in(self.memory))):
                finished = wire.read_results(*frame)
                new = [one for one in finished if _TASK_AND_TOKEN(one) not in self.recent]
                yield [wire.PLAIN, new], b""

    def read(self, events: list[Event], *, is_last: bool = False) -> None:
        """Add what it has sent as events. ``is_last``: it is gone."""
        self._hear(self.channel.receive(), events)
        if is_last:
            self._hear(self._unsent(), events)

    def _hear(self, frames: Iterable[tuple[list[Any], bytes]], events: list[Event]) -> None:
        finished: list[Finished] = []
        for header, body in frames:
            match header[0]:
                case wire.RESULT | wire.PLAIN:
                    finished += wire.read_results(header, body)
                case wire.PROGRESS:
                    events.append(Progress(self.worker_id, *header[1:]))
                case wire.METRICS:
                    _, task_id, token, serial = header
                    events.append(Logged(self.worker_id, task_id, token, serial, body))
                case wire.DIVIDED:
                    kept, given = canonical.decode(body)
                    events.append(Divided(self.worker_id, header[1], header[2], kept, given))
                case wire.RETURNED:
                    self._have_ended(finished, events)
                    finished = []
                    ids = [int(text) for text in body.decode().split(",") if text]
                    events.append(Returned(self.worker_id, ids))
                case wire.UNFIT:
                    self.unfit = header[1]
                case wire.READY:
                    self.tasks_end = os.stat(self.log).st_size
                    events.append(WorkerReady(self.worker_id, self.process.pid))
                case wire.BROKEN:
                    trace = body.decode("utf-8", "replace")
                    events.append(TargetBroken(self.worker_id, header[1], trace))
        self._have_ended(finished, events)

    def _have_ended(self, finished: list[Finished], events: list[Event]) -> None:
        if finished:
            self.tasks_end = max(self.tasks_end, *map(_LOG_END, finished))
            self.recent.extend(map(_TASK_AND_TOKEN, finished))
            if self.looked_s:  # a late one has an older end
                self.ended_s = max(self.ended_s, end_of(finished))
            self.spare_at = None  # it ended as it was told
            events.append(Results(self.worker_id, finished))
