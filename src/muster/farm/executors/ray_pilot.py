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
from muster.farm.events import Event, Results, Returned, WorkerDied
from muster.farm.executors.base import Assignment
from muster.farm.executors.local import LocalExecutor
from muster.farm.executors.ray_files import FilesForDriver
from muster.farm.executors.remote import PASS, CommandReader, Unpacker, is_shipped, pack_event
from muster.farm.task import TargetSpec
from muster.hosts.code import moved_path, unpack_code
from muster.hosts.kept_code import KeptCode
from muster.run.folder import RunFolder

#: What one answer to ``poll`` holds at most, but for the last frame in it.
PARCEL_BYTES = 16 << 20
_TICK_S = 0.1
#: While the worker has more to do, what it says within this time travels in one answer.
GATHER_S = 0.04
_CHECKPOINTS_EVERY_S = 1.0
#: Below the scratch folder: code that was sent (by a frame of that name), and the run folder of a
#: pilot that has its own.
CODE, RUNS = "code", "runs"


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
        """Where this is and what it sees. Nothing is done for another version of Muster. Nothing is
        left if the answer finds nobody: the run may be over before a node has room.
        """
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
        if not self._next:
            self._folder.create()
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
                self._files.hand_over(header, body)
            if self._executor is None:
                self._executor = self._open_executor()
            if header[0] == PASS:
                self._num_held += header[2]
                self._executor.pass_on(header[1], body)
            else:
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

    def _open_executor(self) -> LocalExecutor:
        """Late, because code may have to arrive first."""
        roots, code = self._setup.roots, self._scratch / CODE
        home = code / "0" if code.exists() else Path(roots[0])
        if home.is_dir():
            os.chdir(home)  # commands and relative paths mean the driver's folder
        targets = {
            int(number): _moved(decode(TargetSpec, record), roots, code)
            for number, record in self._setup.targets.items()
        }
        executor = LocalExecutor(
            Assignment(folder=self._folder, run_id=self._mark, targets=targets)
        )
        self._commands = CommandReader(executor)
        asyncio.get_running_loop().add_reader(executor.fileno(), self._hear)
        return executor

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
        yield pack_event(event, wire.pack_plain)

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
