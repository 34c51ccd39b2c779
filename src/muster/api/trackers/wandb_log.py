"""Reads what W&B has written to its log on this disk, with W&B's own records.

The log is LevelDB's: blocks of 32 KiB with pieces of records, each behind its checksum, its length
and its kind. W&B's package has no reader of it in Python.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK = 32 * 1024
_HEADER = struct.Struct("<IHB")
_FILE_HEADER = 7
#: A whole record, and the last piece of one.
_WHOLE, _LAST = 1, 4


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
