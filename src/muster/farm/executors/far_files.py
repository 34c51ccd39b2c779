"""The far end's side of shipping: what of a worker's files is sent home, and when.

Before a result its part of the log, its attempt's folder and a map's chunk; a checkpoint when it
is new. So the near end has every file of a result before it hears of the result.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from muster.farm import wire
from muster.farm.events import Event, Progress, Results, Returned, WorkerDied
from muster.farm.executors.remote import pack_event
from muster.farm.executors.shipping import pack_file, pack_folder, pack_log
from muster.farm.model import Finished, Outcome
from muster.run.folder import RunFolder

#: A checkpoint above this size stays where it is.
CHECKPOINT_LIMIT_BYTES = 1 << 30
#: First parts of the places that the near end accepts.
SENT_HOME = ("attempts", "checkpoints", "parts", "columns.json")


class FarFiles:
    """Of one pilot, whose worker writes to ``folder`` on a machine of its own."""

    def __init__(self, folder: RunFolder, slot_id: int) -> None:
        self._folder = folder
        self._slot_id = slot_id
        self._log_sent = 0
        self._held: dict[int, tuple[str, int]] = {}  # task id → key and token
        self._worker_id = 0
        self._checkpoints: dict[str, tuple[int, int]] = {}  # key → what was sent last
        self._columns = (0, 0)

    def hand_over(self, header: list[Any]) -> None:
        """Take note of a command's frame: which tasks the worker has from now."""
        if header[0] == "start":
            self._worker_id = header[1]
        elif header[0] == wire.TASK:
            _, task_id, key, _, _, token, *_ = header
            self._held[task_id] = (key, token)

    def arrived(self, place: str) -> None:
        """A file came from the near end, which need not get it back."""
        if place.startswith("checkpoints/"):
            key = Path(place).stem
            self._checkpoints[key] = _version(self._folder.checkpoint(key))

    def before(self, event: Event) -> Iterator[bytes]:
        """What has to be there before this event is heard."""
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
        """Those that tasks have written since the last call, the newest of each."""
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
            text = f"checkpoint of {size >> 20} MiB stays on its node: too large to be sent"
            yield pack_event(Progress(self._worker_id, task_id, text))

    def _log(self, end: int) -> Iterator[bytes]:
        if end > self._log_sent:
            start, self._log_sent = self._log_sent, end
            log = self._folder.worker_log(self._slot_id)
            yield from pack_log(log, start, end, self._slot_id)


def _version(path: Path) -> tuple[int, int]:
    """Differs when a file was replaced; (0, 0) when there is none."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return 0, 0
    return found.st_ino, found.st_mtime_ns
