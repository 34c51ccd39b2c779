"""Numbers over time of a run of any kind, as the same columns."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from muster.base.errors import UsageError
from muster.base.metric_log import PROCESS, is_mark, numbers_of
from muster.farm import wire
from muster.farm.canonical import short_key, task_label
from muster.farm.ledger.read import LedgerReader
from muster.farm.ledger.records import TaskRow
from muster.farm.metrics import Curve, curves_of, cut
from muster.run.folder import RunFolder

if TYPE_CHECKING:
    import pyarrow as pa

#: Tasks that are read with one statement.
_AT_ONCE = 500


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
        logged = sorted(ledger.tasks_with_metrics())
        for first in range(0, len(logged), _AT_ONCE):
            for row in ledger.rows_of(logged[first : first + _AT_ONCE]):
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


class RankLine(NamedTuple):
    """A line of a ``metrics.jsonl``. ``start``: which start of the program has written it, from 1
    on; ``number``: of the line in that start, which is its step where it names none."""

    start: int
    number: int
    record: dict[str, Any]


class RankLines:
    """The lines of a ``metrics.jsonl`` that have come since the last look, or all of them again
    where a training has cut the steps that it makes anew: then ``num_cuts`` grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.num_cuts = 0
        self._offset = self._number = 0
        self._last, self._mark = b"", ""
        self._starts: dict[str, int] = {}

    def __iter__(self) -> Iterator[RankLine]:
        """The whole lines that hold a JSON object. Whoever leaves early goes on there."""
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            self._cut()
            return
        with file:
            file.seek(self._offset - len(self._last))
            if file.read(len(self._last)) != self._last:
                self._cut()
            file.seek(self._offset)
            while (line := file.readline()).endswith(b"\n"):
                self._offset += len(line)
                self._last = line
                if is_mark(line):
                    self._mark, self._number = line.strip().decode(), 0
                    continue
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError):
                    continue
                if isinstance(record, dict):
                    # Older musters marked no starts, but named the process in every line.
                    process = self._mark or str(record.get(PROCESS))
                    start = self._starts.setdefault(process, len(self._starts) + 1)
                    number, self._number = self._number, self._number + 1
                    yield RankLine(start, number, record)

    def _cut(self) -> None:
        if self._offset:
            self.num_cuts += 1
            self._offset = self._number = 0
            self._last, self._mark = b"", ""
            self._starts.clear()


class _Columns(NamedTuple):
    """Points of one metric as numbers side by side, in a tenth of the room of Python's objects."""

    step: array[int]
    time_s: array[float]
    value: array[float]

    def as_curve(self, start: int) -> Curve:
        import numpy as np

        return Curve._make(map(np.asarray, (*self, array("q", [start]) * len(self.step))))


class RankLog:
    """What a training, an agent or a program under ``muster run`` has written down.

    Each start of a program counts as an attempt; a training has cut what it makes again.
    """

    def __init__(self, path: Path) -> None:
        self._lines = RankLines(path)
        self._num_cuts = 0
        self._curves: dict[str, Curve] = {}

    def curves(self) -> dict[str, Curve]:
        """What holds now, by metric; none where nothing was written."""
        new: dict[str, dict[int, _Columns]] = {}
        for start, number, record in self._lines:
            if (found := numbers_of(record, number)) is not None:
                step, time_s, numbers = found
                attempt = 1 if "kind" in record else start
                for name, value in numbers.items():
                    columns = new.setdefault(name, {}).get(attempt)
                    if columns is None:
                        columns = _Columns(array("q"), array("d"), array("d"))
                        new[name][attempt] = columns
                    columns.step.append(step)
                    columns.time_s.append(math.nan if time_s is None else time_s)
                    columns.value.append(value)
        if self._num_cuts != self._lines.num_cuts:
            self._num_cuts, self._curves = self._lines.num_cuts, {}
        for name in list(new):
            self._add(wire.clean(name), new.pop(name))
        return dict(self._curves)

    def _add(self, name: str, new: Mapping[int, _Columns]) -> None:
        """Join what was known of a metric with what is new, so that a look takes no longer because
        of all looks before it.
        """
        import numpy as np

        by_start: dict[tuple[int, int], list[Curve]] = {}
        if (known := self._curves.get(name)) is not None:
            for attempt in np.unique(known.token).tolist():
                own = Curve._make(column[known.token == attempt] for column in known)
                by_start[attempt, 0] = [own]
        for attempt, columns in new.items():
            by_start.setdefault((attempt, 0), []).append(columns.as_curve(attempt))
        self._curves[name] = cut(by_start)
