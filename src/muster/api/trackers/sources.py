"""Where the points of a run are: in its ledger, or in the metrics.jsonl of a gang."""

from __future__ import annotations

import importlib.metadata
import json
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

from muster.api.trackers.feed import Source
from muster.api.trackers.tracker import Ended, Ending, Point, Tracked
from muster.base.code import code_id
from muster.base.codec import read_json
from muster.base.errors import MusterError
from muster.base.journal import read_journal
from muster.base.metric_log import PROCESS, TIME
from muster.base.shown_text import is_secret_name
from muster.farm.canonical import decode, task_label
from muster.farm.ledger.read import LedgerReader, TaskRow
from muster.farm.metrics import frames_above
from muster.farm.points import decode as decode_points
from muster.farm.rows import flattened, metrics_of
from muster.farm.task import TaskState
from muster.farm.template import is_command_of, is_number, to_number
from muster.run.folder import RunFolder
from muster.run.record import RunRecord, read_run
from muster.run.state import Tasks, state_of

_FRAMES_AT_ONCE = 500
_POINTS_AT_ONCE, _ENDS_AT_ONCE = 10_000, 500
_STATES: Mapping[TaskState, Ending] = {
    TaskState.DONE: "done", TaskState.FAILED: "failed", TaskState.CANCELLED: "stopped",
    TaskState.STOPPED: "stopped",
}  # fmt: skip
#: What a line of metrics.jsonl says of the line.
_ABOUT = frozenset({"step", "kind", TIME, PROCESS})


def source_of(folder: RunFolder, run_id: str) -> Source:
    """``run_id``: of this very folder, by which trackers know the run."""
    record = read_run(folder)
    if record.is_gang:
        return GangSource(folder, record, run_id)
    kind = MapSource if record.is_map else LedgerSource
    return kind(folder, record, run_id)


class LedgerSource:
    """A sweep: one tracked run for each task. A mark is the number of a frame."""

    def __init__(self, folder: RunFolder, record: RunRecord, run_id: str) -> None:
        self._folder = folder
        self._about = _About(record, run_id)

    def read(self, mark: int | None) -> tuple[int | None, Mapping[int, Sequence[Point]]]:
        found: dict[int, list[Point]] = {}
        with _open(self._folder) as ledger:
            for frame in islice(frames_above(ledger, mark or 0), _FRAMES_AT_ONCE):
                mark = frame.frame_id
                found.setdefault(frame.task_id, []).extend(map(Point._make, frame.points.rows()))
        return mark, found

    def last_steps(self, task: int, mark: int | None) -> Mapping[str, int]:
        last: dict[str, int] = {}
        if mark:
            with _open(self._folder) as ledger:
                for row in ledger.metrics(task_id=task):
                    if row.frame_id <= mark:
                        for point in decode_points(row.body).rows():
                            last[point.name] = max(point.step, last.get(point.name, point.step))
        return last

    def tracked(self, task: int) -> Tracked:
        with _open(self._folder) as ledger:
            row = ledger.task(task)
        key, label = row.key.hex()[:12], task_label(row.task_id, row.payload)
        return self._about.tracked(part=key, name=label, settings=_settings(row))

    def ends(
        self, known: Collection[tuple[int, int]], *, is_over: bool
    ) -> list[tuple[tuple[int, int], Ended]]:
        with _open(self._folder) as ledger:
            new = islice((key for key in ledger.ended() if key not in known), _ENDS_AT_ONCE)
            return [(key, self._ended(ledger.task(key[0]))) for key in new]

    def num_after(self, mark: int | None) -> int:
        with _open(self._folder) as ledger:
            return sum(len(frame.points) for frame in frames_above(ledger, mark or 0))

    def _ended(self, row: TaskRow) -> Ended:
        result = {}
        with suppress(OSError, ValueError):  # a result that was removed by hand
            result = flattened(metrics_of(self._folder, row))
        return Ended(
            state=_STATES[row.state],
            result=result,
            time_s=(row.started_s or 0.0) + (row.seconds or 0.0),
        )


class MapSource(LedgerSource):
    """A map: one tracked run for all of it; what a chunk has logged has its number in the name."""

    def __init__(self, folder: RunFolder, record: RunRecord, run_id: str) -> None:
        super().__init__(folder, record, run_id)
        self._record = record

    def read(self, mark: int | None) -> tuple[int | None, Mapping[int, Sequence[Point]]]:
        mark, found = super().read(mark)
        points = [
            point._replace(name=f"chunk {task}/{point.name}")
            for task, some in found.items()
            for point in some
        ]
        return mark, {0: points} if points else {}

    def last_steps(self, task: int, mark: int | None) -> Mapping[str, int]:
        last: dict[str, int] = {}
        before: int | None = None
        while mark and (before or 0) < mark:
            after, found = self.read(before)
            if after == before or after is None or after > mark:
                break
            before = after
            for point in found.get(0, ()):
                last[point.name] = max(point.step, last.get(point.name, point.step))
        return last

    def tracked(self, task: int) -> Tracked:
        return self._about.tracked(settings=flattened(dict(self._record.spec)))

    def ends(
        self, known: Collection[tuple[int, int]], *, is_over: bool
    ) -> list[tuple[tuple[int, int], Ended]]:
        key = (0, _num_starts(self._folder))
        if not is_over or key in known:
            return []
        with _open(self._folder) as ledger:
            counts, is_whole = ledger.counts(), ledger.meta("enqueued") is not None
        tasks = Tasks(
            done=counts[TaskState.DONE],
            failed=counts[TaskState.FAILED],
            cancelled=counts[TaskState.CANCELLED],
            open=counts[TaskState.READY] + counts[TaskState.CLAIMED],
            is_whole=is_whole,
        )
        word = state_of(self._folder, self._record, tasks, is_running=False).word
        result = _json(self._folder.published_json)
        return [(key, Ended(state=_ending(word), result=flattened(result), time_s=time.time()))]


class GangSource:
    """A training: one tracked run. A mark has the last step of every metric, because the file is
    cut at the step where a training goes on."""

    def __init__(self, folder: RunFolder, record: RunRecord, run_id: str) -> None:
        self._folder = folder
        self._record = record
        self._about = _About(record, run_id)
        self._offset, self._number, self._file = 0, 0, (0, 0)

    def read(
        self, mark: Mapping[str, int] | None
    ) -> tuple[Mapping[str, int] | None, Mapping[int, Sequence[Point]]]:
        last = dict(mark or {})
        points: list[Point] = []
        for line in self._lines():
            for point in _points(line):
                if point.step > last.get(point.name, -1 << 63):
                    last[point.name] = point.step
                    points.append(point)
            if len(points) >= _POINTS_AT_ONCE:
                break
        return (last, {0: points}) if points else (mark, {})

    def last_steps(self, task: int, mark: Mapping[str, int] | None) -> Mapping[str, int]:
        return mark or {}

    def tracked(self, task: int) -> Tracked:
        spec = self._record.spec
        asked = spec.get("train") or {}
        settings = {**(asked.get("settings") or {}), **(spec.get("config") or {})}
        program = {} if settings else {"program": json.dumps(spec.get("program"), default=str)}
        return self._about.tracked(settings=flattened(settings) or program)

    def ends(
        self, known: Collection[tuple[int, int]], *, is_over: bool
    ) -> list[tuple[tuple[int, int], Ended]]:
        key = (0, _num_starts(self._folder))
        if not is_over or key in known:
            return []
        word = state_of(self._folder, self._record, Tasks(), is_running=False).word
        result = _json(self._folder.training_results)
        result.pop("evaluations", None)  # they are points
        return [(key, Ended(state=_ending(word), result=flattened(result), time_s=time.time()))]

    def num_after(self, mark: Mapping[str, int] | None) -> int:
        last = mark or {}
        found = enumerate(read_journal(self._folder.metrics))
        lines = ({"step": number, **line} for number, line in found)
        return sum(p.step > last.get(p.name, -1 << 63) for line in lines for p in _points(line))

    def _lines(self) -> Iterator[Mapping[str, Any]]:
        """The whole lines behind those that were read, or all of a file that was cut."""
        try:
            with self._folder.metrics.open("rb") as file:
                found = _identity(file)
                if found != self._file:
                    self._offset, self._number, self._file = 0, 0, found
                file.seek(self._offset)
                while (line := file.readline()).endswith(b"\n"):
                    self._offset += len(line)
                    with suppress(ValueError, RecursionError):
                        record = json.loads(line)
                        if isinstance(record, dict):
                            yield {"step": self._number, **record}
                            self._number += 1
        except FileNotFoundError:
            return


class _About:
    """What all tracked runs of a run have in common."""

    def __init__(self, record: RunRecord, run_id: str) -> None:
        self._record = record
        self._run_id = run_id

    def tracked(self, *, settings: Mapping[str, Any], part: str = "", name: str = "") -> Tracked:
        record = self._record
        tags = {"muster": importlib.metadata.version("muster-gpu"), "kind": record.kind}
        if code := code_id(record.code):
            tags["code"] = code
        return Tracked(
            id=f"{self._run_id}-{part}" if part else self._run_id,
            name=name or record.name,
            group=f"{record.name}-{self._run_id[:8]}",
            folder=part,
            settings={k: "…" if is_secret_name(k) else value for k, value in settings.items()},
            tags=tags,
        )


def _settings(row: TaskRow) -> Mapping[str, Any]:
    params = flattened(decode(row.payload))
    if not is_command_of(row.target, params):
        return params
    return {  # a command gets texts
        name: to_number(value) if isinstance(value, str) and is_number(value) else value
        for name, value in params.items()
    }


def _points(line: Mapping[str, Any]) -> Iterator[Point]:
    step, kind = line.get("step"), line.get("kind")
    if not isinstance(step, int) or isinstance(step, bool):
        return
    when = line.get(TIME)
    time_s = float(when) if isinstance(when, int | float) else time.time()
    for name, value in line.items():
        if name not in _ABOUT and isinstance(value, int | float):
            yield Point(f"{kind}/{name}" if kind else name, step, time_s, float(value))


def _ending(word: str) -> Ending:
    endings: Mapping[str, Ending] = {"done": "done", "failed": "failed", "refused": "failed"}
    return endings.get(word, "stopped")


def _num_starts(folder: RunFolder) -> int:
    return sum(line.get("event") == "start" for line in read_journal(folder.events))


def _json(path: Any) -> dict[str, Any]:
    with suppress(MusterError):
        found = read_json(path, "results")
        if isinstance(found, dict):
            return found
    return {}


def _identity(file: Any) -> tuple[int, int]:
    import os

    found = os.fstat(file.fileno())
    return found.st_dev, found.st_ino


def _open(folder: RunFolder) -> LedgerReader:
    return LedgerReader(folder.ledger)
