"""What a pilot that does not see the run folder sends home: logs, folders of attempts, checkpoints,
and the chunks of a map. The other way goes ``ray_sending``.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from muster.farm import wire
from muster.farm.events import Event, Progress, Results, Returned, WorkerDied
from muster.farm.executors.remote import PASS, START, pack_event, pack_file, pack_folder, pack_log
from muster.farm.task import Finished, Outcome
from muster.run.folder import RunFolder

#: A checkpoint above this size stays where it is.
CHECKPOINT_LIMIT_BYTES = 1 << 30
#: First parts of the places that the driver accepts.
SENT_HOME = ("attempts", "checkpoints", "parts", "columns.json")


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

    def hand_over(self, header: list[Any], body: bytes) -> None:
        """Note from a command's frame which tasks the worker has from now on."""
        if header[0] == START:
            self._worker_id = header[1]
        elif header[0] == PASS:
            [frame] = wire.unpack(bytearray(body))
            orders, _ = wire.read_tasks(*frame)
            self._held.update((order.task_id, (order.key, order.token)) for order in orders)

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
