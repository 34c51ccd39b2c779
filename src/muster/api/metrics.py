"""Numbers over time of a run of any kind, as the same columns."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

from muster.base.errors import UsageError
from muster.base.metric_log import PROCESS, numbers_of
from muster.farm.canonical import short_key, task_label
from muster.farm.ledger.read import LedgerReader, TaskRow
from muster.farm.metrics import Curve, Points, curves_of, decode, effective, encode
from muster.run.folder import RunFolder

if TYPE_CHECKING:
    import pyarrow as pa


class Series(NamedTuple):
    """One metric of one task. ``label`` is what people call the task; both are "" without tasks."""

    task: str
    label: str
    name: str
    curve: Curve


class Summary(NamedTuple):
    """A series in a few numbers; its extremes are NaN where none of its values is a number."""

    task: str
    label: str
    name: str
    num_points: int
    last_step: int
    last: float
    smallest: float
    smallest_at: int
    largest: float
    largest_at: int


def series_of_tasks(folder: RunFolder, task_id: int | None = None) -> Iterator[Series]:
    """What one task has logged, or all of them, in the order of the plan."""
    with LedgerReader(folder.ledger) as ledger:
        if task_id is not None:
            yield from series_of(ledger, ledger.task(task_id))
            return
        logged = ledger.tasks_with_metrics()
        for row in ledger.tasks():
            if row.task_id in logged:
                yield from series_of(ledger, row)


def series_of(ledger: LedgerReader, row: TaskRow) -> Iterator[Series]:
    """What one task has logged."""
    key, label = short_key(row.key), task_label(row.task_id, row.payload)
    for name, curve in curves_of(ledger, row.task_id).items():
        yield Series(key, label, name, curve)


def series_of_ranks(folder: RunFolder) -> Iterator[Series]:
    """What a training, an agent or a program under ``muster run`` has written down."""
    for name, curve in RankLog(folder.metrics).curves().items():
        yield Series("", "", name, curve)


def table_of(found: Iterable[Series]) -> pa.Table:
    """One row per point: task, attempt, name, step, time, value.

    ``time`` is in seconds since 1970, empty where it was not recorded; ``task`` is empty, and
    ``attempt`` a start of the program, in a run without tasks.
    """
    import numpy as np
    import pyarrow as pa

    schema = pa.schema(
        [("task", pa.string()), ("attempt", pa.int64()), ("name", pa.string()),
         ("step", pa.int64()), ("time", pa.float64()), ("value", pa.float64())]
    )  # fmt: skip
    batches = []
    for task, _, name, curve in found:
        count = len(curve.step)
        columns = [
            pa.repeat(pa.scalar(task or None, pa.string()), count),
            pa.array(curve.token),
            pa.repeat(pa.scalar(name, pa.string()), count),
            pa.array(curve.step),
            pa.array(curve.time_s, mask=np.isnan(curve.time_s)),
            pa.array(curve.value),
        ]
        batches.append(pa.RecordBatch.from_arrays(columns, schema=schema))
    return pa.Table.from_batches(batches, schema=schema)


def summary_of(series: Series) -> Summary:
    """The last value of a series, its smallest and its largest, and the steps of both."""
    import numpy as np

    step, value = series.curve.step, series.curve.value
    known = np.flatnonzero(~np.isnan(value))
    low, high = (
        (int(known[value[known].argmin()]), int(known[value[known].argmax()]))
        if len(known)
        else (0, 0)
    )
    return Summary(
        series.task,
        series.label,
        series.name,
        len(step),
        int(step[-1]),
        float(value[-1]),
        float(value[low]),
        int(step[low]),
        float(value[high]),
        int(step[high]),
    )


def write_points(found: Iterable[Series], target: Path) -> int:
    """Write the table to a .parquet, .csv or .jsonl file; returns the number of rows."""
    from muster.farm.export import export_table

    return export_table(table_of(found), target)


def only(found: Iterable[Series], name: str | None) -> list[Series]:
    """The series of this name, or all of them; UsageError where only others were logged."""
    every = list(found)
    kept = [series for series in every if name in (None, series.name)]
    if name is not None and every and not kept:
        known = ", ".join(sorted({series.name for series in every}))
        raise UsageError(f"No metric is called {name!r}.", hint=f"logged were: {known}.")
    return kept


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
