"""The numbers in a ``metrics.jsonl`` as curves; of a file that grows only new lines are read."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import BinaryIO

from muster.base.metric_log import PROCESS, numbers_of
from muster.farm.metrics import Curve, effective
from muster.farm.points import Points, decode, encode


class RankLog:
    """What a training, an agent or a program under ``muster run`` has written down.

    Each start of a program counts as an attempt; a training has cut what it makes again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._forget()

    def curves(self) -> dict[str, Curve]:
        """What holds now, by metric; none where nothing was written."""
        try:
            with self._path.open("rb") as file:
                if not self._goes_on(file):
                    self._forget()
                self._read(file)
        except FileNotFoundError:
            self._forget()
        return effective(self._frames)

    def _forget(self) -> None:
        self._offset = 0
        self._last = b""
        self._num_lines = 0
        self._starts: dict[str, int] = {}
        self._frames: list[tuple[int, Points]] = []

    def _goes_on(self, file: BinaryIO) -> bool:
        """Whether what was read is still there: a training that goes on from a checkpoint cuts the
        steps that it makes again."""
        file.seek(self._offset - len(self._last))
        return file.read(len(self._last)) == self._last

    def _read(self, file: BinaryIO) -> None:
        """Read the whole lines behind those that are known."""
        file.seek(self._offset)
        together: dict[int, list[tuple[str, int, float, float]]] = {}
        for line in file:
            if not line.endswith(b"\n"):
                break
            self._offset += len(line)
            self._last = line
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if not isinstance(record, dict):
                continue
            number, self._num_lines = self._num_lines, self._num_lines + 1
            if (found := numbers_of(record, number)) is None:
                continue
            step, time_s, numbers = found
            written_s = math.nan if time_s is None else time_s
            start = self._starts.setdefault(str(record.get(PROCESS)), len(self._starts) + 1)
            points = [(name, step, written_s, value) for name, value in numbers.items()]
            together.setdefault(1 if "kind" in record else start, []).extend(points)
        self._frames += [(start, decode(encode(points))) for start, points in together.items()]
