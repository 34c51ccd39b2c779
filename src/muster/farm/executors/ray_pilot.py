"""What runs in a Ray actor: a local executor with one slot, fed with frames and heard in frames.

All of it runs in the actor's event loop, in one thread that lives as long as the actor: workers
die with the thread that has started them. Ray itself is not imported here.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import importlib.metadata
import io
import os
import platform
import secrets
import shutil
import socket
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from muster.base.codec import decode
from muster.base.errors import SetupError
from muster.farm import wire
from muster.farm.events import Event, Progress, Results, Returned, WorkerDied
from muster.farm.executors.base import Assignment
from muster.farm.executors.local import LocalExecutor
from muster.farm.executors.remote import (
    CommandReader,
    Unpacker,
    is_shipped,
    pack_event,
    pack_file,
    pack_folder,
    pack_log,
)
from muster.farm.task import Finished, Outcome, TargetSpec
from muster.hosts.code import moved_path, unpack_code
from muster.hosts.kept_code import KeptCode
from muster.run.folder import RunFolder

#: What one answer to ``poll`` holds at most, but for the last frame in it.
PARCEL_BYTES = 16 << 20
_TICK_S = 0.1
#: While the worker has more to do, what it says within this time travels in one answer.
GATHER_S = 0.02
_CHECKPOINTS_EVERY_S = 1.0
#: Below the scratch folder: code that was sent (by a frame of that name), and the run folder of a
#: pilot that has its own.
CODE, RUNS = "code", "runs"
#: A checkpoint above this size stays where it is.
CHECKPOINT_LIMIT_BYTES = 1 << 30
#: First parts of the places that the driver accepts.
SENT_HOME = ("attempts", "checkpoints", "parts", "columns.json")


@dataclass(frozen=True, kw_only=True)
class PilotSetup:
    """What a pilot is told; travels as JSON, so that versions can be compared first.

    ``token_path`` holds ``token`` if the run folder is the driver's. ``roots``: the driver's
    folders with code, its working folder first. ``digests``: of the files that targets are in.
    ``kept_code``: the hash of all code, where a host keeps it for the next start; else "".
    ``input_files``: what a map reads, with sizes.
    """

    version: str
    run_path: str
    token_path: str
    token: str
    run_id: str
    slot_id: int
    targets: Mapping[str, Mapping[str, Any]]
    roots: Sequence[str]
    digests: Mapping[str, str]
    kept_code: str
    input_files: Mapping[str, int]

    def to_json(self) -> bytes:
        return orjson.dumps(dataclasses.asdict(self))


class Pilot:
    """The actor. ``open`` is called once and first; ``apply`` is numbered from 0."""

    def __init__(self) -> None:
        self._early: dict[int, bytes] = {}
        self._next = 0
        self._queue: deque[Iterator[bytes]] = deque()
        self._executor: LocalExecutor | None = None
        self._files: FilesForDriver | None = None
        self._error: Exception | None = None
        self._checked_s = 0.0
        self._num_held = 0  # tasks that the worker has
        self._gathering: asyncio.TimerHandle | None = None

    async def open(self, setup: bytes) -> dict[str, Any]:
        """Where this is and what it sees. Nothing is done for another version of Muster."""
        record = orjson.loads(setup)
        about = {
            "version": muster_version(),
            "python": platform.python_version(),
            "host": socket.gethostname(),
        }
        if record["version"] != about["version"]:
            return about
        self._changed = asyncio.Event()
        self._setup = PilotSetup(**record)
        mark = f"{self._setup.run_id}.{self._setup.slot_id}."
        _remove_left(mark)
        self._scratch = Path(tempfile.gettempdir()) / f"muster-{mark}{secrets.token_hex(4)}"
        self._mark = mark
        is_shared = _holds(Path(self._setup.token_path), self._setup.token)
        run_path = Path(self._setup.run_path)
        if not is_shared:
            run_path = self._scratch / RUNS / run_path.name
            self._files = FilesForDriver(RunFolder(run_path), self._setup.slot_id)
        self._folder = RunFolder(run_path)
        self._folder.create()
        self._unpacker = Unpacker(self._scratch, (RUNS,))
        has_code = is_shared and _is_same_code(self._setup.roots[0], self._setup.digests)
        missing = [p for p, size in self._setup.input_files.items() if _size_of(Path(p)) != size]
        return {
            **about,
            "is_shared": is_shared,
            "has_code": has_code,
            "keeps_code": not has_code and self._lays_out_kept(),
            "scratch": str(self._scratch),
            "missing": missing,
        }

    async def apply(self, number: int, data: bytes) -> None:
        """Commands and files, as frames. Ray may deliver large ones late: they are put in order."""
        self._early[number] = data
        try:
            while self._next in self._early:
                self._apply(bytearray(self._early.pop(self._next)))
                self._next += 1
        except Exception as error:
            self._error = error  # heard by ``poll``, which somebody waits for
            self._changed.set()

    async def poll(self) -> bytes:
        """Frames of what has happened; waits until there is something."""
        while True:
            if self._error is not None:
                raise self._error
            parcel = self._parcel()
            if parcel:
                return parcel
            self._changed.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), _TICK_S)
            self._look()

    async def close(self) -> None:
        """End the worker with all it has started, and remove the scratch folder."""
        if self._executor is not None:
            if self._gathering is None:
                asyncio.get_running_loop().remove_reader(self._executor.fileno())
            else:
                self._gathering.cancel()
            self._executor.close()
            self._executor = None
        if hasattr(self, "_scratch"):
            os.chdir("/")
            shutil.rmtree(self._scratch, ignore_errors=True)

    # ------------------------------------------------------------------ commands

    def _apply(self, data: bytearray) -> None:
        for header, body in wire.unpack(data):
            if header[0] == CODE:
                unpack_code(io.BytesIO(body), self._scratch / CODE)
                self._keep(body)
                continue
            if is_shipped(header):
                place = self._unpacker.take(header, body)
                if place is not None and self._files is not None:
                    self._files.arrived(place.removeprefix(f"{RUNS}/{self._folder.name}/"))
                continue
            if self._files is not None:
                self._files.hand_over(header)
            if self._executor is None:
                self._open_executor()
            self._num_held += header[0] == wire.TASK
            self._commands.apply([(header, body)])
        if self._gathering is None:
            self._look()

    def _lays_out_kept(self) -> bool:
        """Whether an earlier start has left the code. What cannot be kept is sent each time."""
        with suppress(OSError, SetupError):
            digest = self._setup.kept_code
            return bool(digest) and KeptCode().lay_out(digest, self._scratch / CODE)
        return False

    def _keep(self, packed: bytes) -> None:
        with suppress(OSError, SetupError):
            if self._setup.kept_code:
                KeptCode().take(self._setup.kept_code, io.BytesIO(packed))

    def _open_executor(self) -> None:
        """Late, because code may have to arrive first."""
        roots, code = self._setup.roots, self._scratch / CODE
        home = code / "0" if code.exists() else Path(roots[0])
        if home.is_dir():
            os.chdir(home)  # commands and relative paths mean the driver's folder
        targets = {
            int(number): _moved(decode(TargetSpec, record), roots, code)
            for number, record in self._setup.targets.items()
        }
        self._executor = LocalExecutor(
            Assignment(folder=self._folder, run_id=self._mark, targets=targets)
        )
        self._commands = CommandReader(self._executor)
        asyncio.get_running_loop().add_reader(self._executor.fileno(), self._hear)

    # ------------------------------------------------------------------ events

    def _hear(self) -> None:
        """The worker has spoken. An answer costs as much as some dozen short tasks, so that what
        follows is let gather.
        """
        self._look()
        if self._num_held > 0 and self._executor is not None:
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._executor.fileno())
            self._gathering = loop.call_later(GATHER_S, self._hear_on)

    def _hear_on(self) -> None:
        self._gathering = None
        if self._executor is not None:
            asyncio.get_running_loop().add_reader(self._executor.fileno(), self._hear)

    def _look(self) -> None:
        if self._executor is None:
            return
        for event in self._executor.poll(0.0):
            self._note(event)
            self._queue.append(self._frames(event))
        now = asyncio.get_running_loop().time()
        if self._files is not None and now - self._checked_s > _CHECKPOINTS_EVERY_S:
            self._checked_s = now
            self._queue.append(self._files.new_checkpoints())
        if self._queue:
            self._changed.set()

    def _note(self, event: Event) -> None:
        match event:
            case Results(_, finished):
                self._num_held -= len(finished)
            case Returned(_, task_ids):
                self._num_held -= len(task_ids)
            case WorkerDied():
                self._num_held = 0

    def _frames(self, event: Event) -> Iterator[bytes]:
        if self._files is not None:
            yield from self._files.before(event)
        yield pack_event(event)

    def _parcel(self) -> bytes:
        parts: list[bytes] = []
        size = 0
        while self._queue and size < PARCEL_BYTES:
            frame = next(self._queue[0], None)
            if frame is None:
                self._queue.popleft()
                continue
            parts.append(frame)
            size += len(frame)
        return b"".join(parts)


def muster_version() -> str:
    """The version of Muster that is installed here; both ends must have the same."""
    try:
        return importlib.metadata.version("muster-gpu")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _remove_left(mark: str) -> None:
    """Scratch folders of this slot's earlier pilots here: they were killed."""
    for path in Path(tempfile.gettempdir()).glob(f"muster-{mark}*"):
        shutil.rmtree(path, ignore_errors=True)


def _holds(path: Path, token: str) -> bool:
    try:
        return path.read_text() == token
    except OSError:
        return False


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _is_same_code(home: str, digests: Mapping[str, str]) -> bool:
    return Path(home).is_dir() and all(
        digest_of(Path(path)) == digest for path, digest in digests.items()
    )


def digest_of(path: Path) -> str:
    """A hash of a file's content; empty when it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def _moved(target: TargetSpec, roots: Sequence[str], code: Path) -> TargetSpec:
    """The target in the code that was sent, if any was."""
    if not code.exists():
        return target
    location = target.location
    if os.path.isabs(location):
        location = moved_path(location, roots, code)
    base = moved_path(target.base_folder, roots, code) if target.base_folder else ""
    return dataclasses.replace(target, location=location, base_folder=base)


class FilesForDriver:
    """Sends a worker's files to the driver, which has every file of a result before the result.

    A result's part of the log, its attempt's folder and a map's chunk go first; a checkpoint goes
    when it is new.

    ``folder``: what the worker writes to, which the driver does not see.
    """

    def __init__(self, folder: RunFolder, slot_id: int) -> None:
        self._folder = folder
        self._slot_id = slot_id
        self._log_sent = 0
        self._held: dict[int, tuple[str, int]] = {}  # task id → key and token
        self._worker_id = 0
        self._checkpoints: dict[str, tuple[int, int]] = {}  # key → what was sent last
        self._columns = (0, 0)

    def hand_over(self, header: list[Any]) -> None:
        """Note from a command's frame which tasks the worker has from now on."""
        if header[0] == "start":
            self._worker_id = header[1]
        elif header[0] == wire.TASK:
            _, task_id, key, _, _, token, *_ = header
            self._held[task_id] = (key, token)

    def arrived(self, place: str) -> None:
        """Note a file that came from the driver, which need not get it back."""
        if place.startswith("checkpoints/"):
            key = Path(place).stem
            self._checkpoints[key] = _version(self._folder.checkpoint(key))

    def before(self, event: Event) -> Iterator[bytes]:
        """The frames that the driver must have before it gets this event."""
        match event:
            case Results(_, finished):
                yield from self._log(max((item.log_end for item in finished), default=0))
                for item in finished:
                    yield from self._of_result(item)
            case Returned(_, task_ids):
                for task_id in task_ids:
                    self._held.pop(task_id, None)
            case WorkerDied():
                yield from self._log(event.log_end)
                for key, token in self._held.values():
                    yield from self._checkpoint(key, 0)
                    yield from self._attempt(key, token)
                self._held.clear()

    def new_checkpoints(self) -> Iterator[bytes]:
        """The frames of checkpoints written since the last call, only the newest of each task."""
        for task_id, (key, _) in list(self._held.items()):
            yield from self._checkpoint(key, task_id)

    def _of_result(self, item: Finished) -> Iterator[bytes]:
        key, token = self._held.pop(item.task_id, ("", 0))
        if not key:
            return
        if item.files:
            yield from self._attempt(key, token)
        if item.outcome is not Outcome.OK:
            yield from self._checkpoint(key, item.task_id)
            return
        self._folder.checkpoint(key).unlink(missing_ok=True)
        self._checkpoints.pop(key, None)
        if self._folder.parts.exists():
            yield from self._chunk(key)

    def _attempt(self, key: str, token: int) -> Iterator[bytes]:
        path = self._folder.attempt(key, token)
        if path.exists():
            yield from pack_folder(path, f"attempts/{path.name}")
            shutil.rmtree(path, ignore_errors=True)

    def _chunk(self, key: str) -> Iterator[bytes]:
        version = _version(self._folder.map_columns)
        if version != self._columns:
            self._columns = version
            yield from pack_file(self._folder.map_columns, "columns.json")
        for path in sorted(self._folder.parts.glob(f"*/{key}.*")):
            yield from pack_file(path, f"parts/{path.parent.name}/{path.name}")
            path.unlink()

    def _checkpoint(self, key: str, task_id: int) -> Iterator[bytes]:
        path = self._folder.checkpoint(key)
        version = _version(path)
        if version in ((0, 0), self._checkpoints.get(key)):
            return
        self._checkpoints[key] = version
        size = path.stat().st_size
        if size <= CHECKPOINT_LIMIT_BYTES:
            yield from pack_file(path, f"checkpoints/{path.name}")
        elif task_id:
            text = f"checkpoint of {size >> 20} MiB stays on its node: it is too large to be sent"
            yield pack_event(Progress(self._worker_id, task_id, text))

    def _log(self, end: int) -> Iterator[bytes]:
        if end > self._log_sent:
            start, self._log_sent = self._log_sent, end
            log = self._folder.worker_log(self._slot_id)
            yield from pack_log(log, start, end, self._slot_id)


def _version(path: Path) -> tuple[int, int]:
    """A value that changes when the file is replaced; (0, 0) when there is none."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return 0, 0
    return found.st_ino, found.st_mtime_ns
