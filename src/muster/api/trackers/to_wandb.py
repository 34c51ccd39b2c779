"""Weights & Biases: offline, in the run folder, unless WANDB_MODE says otherwise.

A point counts as accepted when it is in W&B's own log on this disk, from which W&B uploads it or
``wandb sync`` does; that log also tells, after a kill, what it has. It is LevelDB's: blocks of
32 KiB with pieces of records, each behind its checksum, its length and its kind. W&B's package has
no reader of it in Python.
"""

from __future__ import annotations

import json
import re
import struct
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from muster.api.trackers.tracker import (
    PROJECT,
    Ended,
    Place,
    Point,
    Tracked,
    as_utf8,
    escape_first,
    from_tracker,
    rows_of,
    to_tracker,
)
from muster.base.errors import SetupError
from muster.base.settings import variable
from muster.base.shown_text import count

_ALLOWED = re.compile(r"[A-Za-z0-9_./ -]")
#: W&B counts rows by itself; this field is what its charts have as their x-axis.
_STEP = "step"
_LOOK_EVERY_S, _LONGEST_SILENCE_S = 0.02, 60.0
#: Of W&B's log: a block, the header of a piece, the size of the file's header.
_BLOCK = 32 * 1024
_HEADER = struct.Struct("<IHB")
_FILE_HEADER = 7
#: A whole record, and the last piece of one.
_WHOLE, _LAST = 1, 4


class Wandb:
    most_open = 8

    def __init__(self, place: Place) -> None:
        import wandb

        self._library = wandb
        self._folder = Path(variable("WANDB_DIR") or place.trackers / "wandb")

    def open(self, tracked: Tracked) -> WandbRun:
        return WandbRun(self._library, self._folder, tracked)


class WandbRun:
    def __init__(self, library: Any, folder: Path, tracked: Tracked) -> None:
        self.last_steps: dict[str, int] = {}
        rows = 0
        for path in _logs(folder, tracked.id):
            for number, row in Log(path).rows():
                rows = max(rows, number + 1)
                for name in row.keys() - {_STEP}:
                    known = from_tracker(name)
                    step = int(row.get(_STEP, 0))
                    self.last_steps[known] = max(step, self.last_steps.get(known, step))
        folder.mkdir(parents=True, exist_ok=True)
        settings = library.Settings(
            mode=variable("WANDB_MODE") or "offline",
            root_dir=str(folder),
            console="off",
            silent=True,
            disable_code=True,
            disable_git=True,
            disable_job_creation=True,
            x_disable_meta=True,
            x_disable_stats=True,
            x_disable_machine_info=True,
            x_save_requirements=False,
            **_often(library),
        )
        self._run = library.init(
            project=variable("WANDB_PROJECT") or PROJECT,
            group=as_utf8(tracked.group)[:128],
            name=as_utf8(tracked.name)[:128],
            id=tracked.id,
            resume="allow",
            reinit="create_new",
            config={_name(name): _value(value) for name, value in tracked.settings.items()}
            | {f"muster/{name}": value for name, value in tracked.tags.items()},
            tags=[f"{name} {value}"[:64] for name, value in tracked.tags.items()],
            settings=settings,
        )
        self._run.define_metric("*", step_metric=_STEP)
        self._rows = max(rows, self._run.starting_step)
        self._written = self._rows
        is_off = self._run.disabled
        self._log = None if is_off else Log(Path(self._run.dir).parent / f"run-{tracked.id}.wandb")

    def log(self, points: Sequence[Point]) -> None:
        for step, _, values in rows_of(points):
            row = {_name(name): value for name, value in values.items()}
            self._run.log({**row, _STEP: step}, step=self._rows, commit=True)
            self._rows += 1

    def settle(self) -> None:
        heard_s = time.monotonic()
        while self._log is not None and self._written < self._rows:
            for number, _ in self._log.rows():
                self._written, heard_s = number + 1, time.monotonic()
            if time.monotonic() - heard_s > _LONGEST_SILENCE_S:
                missing = count(self._rows - self._written, "row")
                raise SetupError(
                    f"W&B has written nothing for {_LONGEST_SILENCE_S:g} s; {missing} are missing."
                )
            if self._written < self._rows:
                time.sleep(_LOOK_EVERY_S)

    def finish(self, ended: Ended) -> None:
        self._run.summary.update({_name(name): _value(v) for name, v in ended.result.items()})
        self._run.summary["muster/state"] = ended.state
        self._run.finish(exit_code=int(ended.state == "failed"))

    def leave(self) -> None:
        self._run.finish()


def _often(library: Any) -> dict[str, float]:
    """Have what is logged written to W&B's log each second, and not each 15, where the version has
    a setting for it: a point is accepted only then, and the end of a run waits for that.
    """
    name = "x_transaction_log_flush_interval"
    return {name: 1.0} if name in getattr(library.Settings, "model_fields", ()) else {}


def _logs(folder: Path, run_id: str) -> Iterator[Path]:
    """What earlier sessions have written of this run, on this disk."""
    yield from sorted((folder / "wandb").glob(f"*-{run_id}/run-{run_id}.wandb"))


def _name(name: str) -> str:
    mapped = to_tracker(name, _ALLOWED, taken=frozenset({_STEP}))
    return escape_first(mapped) if mapped.startswith("_") else mapped  # W&B's own begin with it


def _value(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, list | dict):
        return json.loads(as_utf8(json.dumps(value, default=str)))
    return as_utf8(value)


class Log:
    """One file that somebody may still be writing."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = _FILE_HEADER

    def rows(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """The rows of the history since the last call: each with its number, without W&B's own
        fields. A record that is not whole yet is left for later."""
        from wandb.proto import wandb_internal_pb2

        for data in self._records():
            record = wandb_internal_pb2.Record.FromString(data)
            if record.WhichOneof("record_type") == "history":
                items = {
                    item.key or ".".join(item.nested_key): json.loads(item.value_json)
                    for item in record.history.item
                }
                row = {name: value for name, value in items.items() if not name.startswith("_")}
                yield record.history.step.num, row

    def _records(self) -> Iterator[bytes]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._position)
                data = file.read()
        except FileNotFoundError:
            return
        start, at, parts = self._position, 0, b""
        while True:
            left = _BLOCK - (start + at) % _BLOCK
            if left < _HEADER.size:
                at += left
                continue
            if at + _HEADER.size > len(data):
                return
            _, length, kind = _HEADER.unpack_from(data, at)
            end = at + _HEADER.size + length
            if end > len(data) or kind == 0:
                return
            parts += data[at + _HEADER.size : end]
            at = end
            if kind in (_WHOLE, _LAST):
                self._position = start + at
                yield parts
                parts = b""
