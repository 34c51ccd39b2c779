"""Where the points of a run are: in its ledger, or in the metrics.jsonl of a gang."""

from __future__ import annotations

import importlib.metadata
import json
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from itertools import islice
from typing import Any

from muster.api.trackers.feed import Source
from muster.api.trackers.metrics import RankLines
from muster.api.trackers.tracker import Ended, Ending, Point, Tracked
from muster.base.code import code_id
from muster.base.codec import read_object
from muster.base.errors import TargetError
from muster.base.metric_log import LATEST_S, PROCESS, TIME, as_number, step_of_line
from muster.base.shown_text import hide_secrets
from muster.farm.canonical import decode, encode, task_label
from muster.farm.ledger.read import LedgerReader
from muster.farm.ledger.records import TaskRow
from muster.farm.metrics import Frame, frames_above
from muster.farm.metrics import decode as decode_points
from muster.farm.rows import flattened, metrics_of
from muster.farm.task import TaskState
from muster.farm.template import is_command_of, is_number, to_number
from muster.run.folder import RunFolder
from muster.run.record import RunRecord, read_run
from muster.run.state import Tasks, starts_of, state_of

_FRAMES_AT_ONCE = 500
_POINTS_AT_ONCE, _ENDS_AT_ONCE = 10_000, 500
_STATES: Mapping[TaskState, Ending] = {
    TaskState.DONE: "done", TaskState.FAILED: "failed", TaskState.CANCELLED: "stopped",
    TaskState.STOPPED: "stopped",
}  # fmt: skip
#: What a line of metrics.jsonl says of the line.
_ABOUT = frozenset({"step", "kind", TIME, PROCESS})
#: In a mark, beside the metrics, whose names these are not: how many lines were read, and how many
#: starts of the program have written them.
_LINES, _ATTEMPT = "step", PROCESS
#: An attempt of a task in a mark or a point has this many starts of its program at most.
_STARTS = 1 << 20


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
        self._copy: LedgerReader | None = None

    @contextmanager
    def looking(self) -> Iterator[None]:
        with ExitStack() as stack:
            reader = stack.enter_context(LedgerReader(self._folder.ledger))
            if reader.is_copy:  # a costly one, of a ledger that lives elsewhere
                self._copy = reader
            else:
                stack.close()  # an open one would keep SQLite's log behind the end of the run
            try:
                yield
            finally:
                self._copy = None

    def read(self, mark: int | None) -> tuple[int | None, Mapping[int, Sequence[Point]]]:
        found: dict[int, list[Point]] = {}
        num_points = 0
        with self._ledger() as ledger:
            for frame in islice(frames_above(ledger, mark or 0), _FRAMES_AT_ONCE):
                mark = frame.frame_id
                found.setdefault(frame.task_id, []).extend(_of_frame(frame))
                num_points += len(frame.points)
                if num_points >= _POINTS_AT_ONCE:
                    break
        return mark, found

    def before(self, task: int, mark: int | None) -> Iterator[Point]:
        if mark:
            with self._ledger() as ledger:
                for row in ledger.metrics(task_id=task):
                    if row.frame_id <= mark:
                        yield from _of_frame(Frame(*row[:3], decode_points(row.body)))

    def tracked(self, task: int) -> Tracked:
        with self._ledger() as ledger:
            row = ledger.task(task)
        params = hide_secrets(decode(row.payload))
        key, label = row.key.hex()[:12], task_label(row.task_id, encode(params))
        return self._about.tracked(part=key, name=label, settings=_settings(row, params))

    def ends(
        self, known: Collection[tuple[int, int]], *, is_over: bool
    ) -> list[tuple[tuple[int, int], Ended]]:
        with self._ledger() as ledger:
            new = islice((key for key in ledger.ended() if key not in known), _ENDS_AT_ONCE)
            return [(key, self._ended(ledger.task(key[0]))) for key in new]

    def num_after(self, mark: int | None) -> int:
        with self._ledger() as ledger:
            return sum(len(frame.points) for frame in frames_above(ledger, mark or 0))

    def _ledger(self) -> AbstractContextManager[LedgerReader]:
        return LedgerReader(self._folder.ledger) if self._copy is None else nullcontext(self._copy)

    def _ended(self, row: TaskRow) -> Ended:
        result = {}
        with suppress(OSError, ValueError):  # a result that was removed by hand
            result = _result(metrics_of(self._folder, row))
        return Ended(
            state=_STATES[row.state],
            result=result,
            time_s=(row.started_s or 0.0) + (row.seconds or 0.0),
        )


class MapSource(LedgerSource):
    """A map: one tracked run for all of it. What a chunk has logged has its number in the name, and
    how far the map has got is in its metrics.jsonl. A mark has the mark of each; older musters,
    which had no such file, left the first alone."""

    def __init__(self, folder: RunFolder, record: RunRecord, run_id: str) -> None:
        super().__init__(folder, record, run_id)
        self._record = record
        self._lines = _Lines(folder, has_starts=True)

    def read(self, mark: Any) -> tuple[Any, Mapping[int, Sequence[Point]]]:
        frame, line = _marks(mark)
        frame, found = super().read(frame)
        points = [
            point for task, some in found.items() for point in map(_named_by_chunk(task), some)
        ]
        line, progress = self._lines.read(line)
        points += progress
        return ({"frame": frame, "line": line}, {0: points}) if points else (mark, {})

    def before(self, task: int, mark: Any) -> Iterator[Point]:
        last, line = _marks(mark)
        with self._ledger() as ledger:
            for frame in frames_above(ledger):
                if frame.frame_id > (last or 0):
                    break
                yield from map(_named_by_chunk(frame.task_id), _of_frame(frame))
        yield from self._lines.before(line)

    def tracked(self, task: int) -> Tracked:
        return self._about.tracked(settings=flattened(hide_secrets(self._record.spec)))

    def ends(
        self, known: Collection[tuple[int, int]], *, is_over: bool
    ) -> list[tuple[tuple[int, int], Ended]]:
        def tasks() -> Tasks:
            with self._ledger() as ledger:
                counts, is_whole = ledger.counts(), ledger.meta("enqueued") is not None
            return Tasks(
                done=counts[TaskState.DONE],
                failed=counts[TaskState.FAILED],
                cancelled=counts[TaskState.CANCELLED],
                open=counts[TaskState.READY] + counts[TaskState.CLAIMED],
                is_whole=is_whole,
            )

        return _end_of_run(
            self._folder, self._record, known, is_over=is_over, tasks=tasks,
            result=lambda: read_object(self._folder.published_json),
        )  # fmt: skip

    def num_after(self, mark: Any) -> int:
        frame, line = _marks(mark)
        return super().num_after(frame) + self._lines.num_after(line)


class GangSource:
    """A training, an agent or a program: one tracked run."""

    def __init__(self, folder: RunFolder, record: RunRecord, run_id: str) -> None:
        self._folder = folder
        self._record = record
        self._about = _About(record, run_id)
        self._lines = _Lines(folder, has_starts=record.is_program)

    def looking(self) -> AbstractContextManager[None]:
        return nullcontext()

    def read(self, mark: Any) -> tuple[Any, Mapping[int, Sequence[Point]]]:
        mark, points = self._lines.read(mark)
        return mark, {0: points} if points else {}

    def before(self, task: int, mark: Any) -> Iterable[Point]:
        return self._lines.before(mark)

    def tracked(self, task: int) -> Tracked:
        spec = self._record.spec
        asked = spec.get("train") or {}
        settings = {**(asked.get("settings") or {}), **(spec.get("config") or {})}
        if not settings:
            program = hide_secrets(spec.get("program"))
            settings = {"program": json.dumps(program, default=str, ensure_ascii=False)}
        return self._about.tracked(settings=flattened(hide_secrets(settings)))

    def ends(
        self, known: Collection[tuple[int, int]], *, is_over: bool
    ) -> list[tuple[tuple[int, int], Ended]]:
        def result() -> dict[str, Any]:
            found = read_object(self._folder.training_results)
            found.pop("evaluations", None)  # they are points
            return found

        return _end_of_run(
            self._folder, self._record, known, is_over=is_over, tasks=Tasks, result=result
        )

    def num_after(self, mark: Any) -> int:
        return self._lines.num_after(mark)


class _Lines:
    """The points of a metrics.jsonl.

    A mark has the last step of every metric, because the file of a training is cut at the step
    where it goes on. Other files are not, and there (``has_starts``) the mark has the number of
    lines.
    """

    def __init__(self, folder: RunFolder, *, has_starts: bool) -> None:
        self._has_starts = has_starts
        self._lines = RankLines(folder.metrics)
        self._num_lines = self._num_cuts = 0

    def read(
        self, mark: Mapping[str, int] | None
    ) -> tuple[Mapping[str, int] | None, Sequence[Point]]:
        """Points after the mark, and the mark behind them; the same mark where nothing is left."""
        last = dict(mark or {})
        num_read = last.get(_LINES, 0)
        # Older musters did not count the lines of a program that named no process in them.
        is_counted = self._has_starts and (not last or _LINES in last)
        points: list[Point] = []
        for line in self._lines:
            if self._num_cuts != self._lines.num_cuts:
                self._num_cuts, self._num_lines = self._lines.num_cuts, 0
            self._num_lines += 1
            attempt = line.start if is_counted else 0
            for point in _points({"step": line.number, **line.record}, attempt):
                before = last.get(point.name, -1 << 64)
                if self._num_lines > num_read if attempt else point.step > before:
                    last[point.name] = max(point.step, before)
                    points.append(point)
            if attempt:
                last[_LINES] = max(self._num_lines, num_read)
                last[_ATTEMPT] = max(attempt, last.get(_ATTEMPT, 0))
            if len(points) >= _POINTS_AT_ONCE:
                break
        return (last, points) if points else (mark, [])

    def before(self, mark: Mapping[str, int] | None) -> list[Point]:
        last = mark or {}
        attempt = last.get(_ATTEMPT, 0)
        return [
            Point(name, step, 0.0, 0.0, attempt)
            for name, step in last.items()
            if name not in _ABOUT
        ]

    def num_after(self, mark: Mapping[str, int] | None) -> int:
        num_points = 0
        while (found := self.read(mark))[1]:
            mark, num_points = found[0], num_points + len(found[1])
        return num_points


def _marks(mark: Any) -> tuple[int | None, Mapping[str, int] | None]:
    """Of a map: how far its frames and its lines were read."""
    return (mark.get("frame"), mark.get("line")) if isinstance(mark, Mapping) else (mark, None)


def _end_of_run(
    folder: RunFolder,
    record: RunRecord,
    known: Collection[tuple[int, int]],
    *,
    is_over: bool,
    tasks: Callable[[], Tasks],
    result: Callable[[], dict[str, Any]],
) -> list[tuple[tuple[int, int], Ended]]:
    """How what is one tracked run has ended, if it has and that is not ``known``."""
    key = (0, sum(bool(one.begin) for one in starts_of(folder)))
    if not is_over or key in known:
        return []
    word = state_of(folder, record, tasks(), is_running=False).word
    return [(key, Ended(state=_ending(word), result=_result(result()), time_s=time.time()))]


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
            settings={name: _sendable(value) for name, value in settings.items()},
            tags=tags,
        )


def _settings(row: TaskRow, params: dict[str, Any]) -> Mapping[str, Any]:
    params = flattened(params)
    if not is_command_of(row.target, params):
        return params
    return {  # a command gets texts
        name: to_number(value) if isinstance(value, str) and is_number(value) else value
        for name, value in params.items()
    }


def _result(found: dict[str, Any]) -> dict[str, Any]:
    flat = flattened(found)
    # A metric may be called auth, but no number that was measured is a secret.
    others = {name: value for name, value in flat.items() if not isinstance(value, int | float)}
    return {name: _sendable(value) for name, value in {**flat, **hide_secrets(others)}.items()}


def _sendable(value: Any) -> Any:
    """No tracker takes integers that need more than 64 bits."""
    return hex(value) if isinstance(value, int) and abs(value) >= 1 << 63 else value


def _of_frame(frame: Frame) -> Iterator[Point]:
    for name, step, time_s, value in frame.points.rows():
        attempt = frame.token * _STARTS + frame.points.start
        yield Point(name, step, _possible(time_s), value, attempt)


def _named_by_chunk(task: int) -> Callable[[Point], Point]:
    return lambda point: point._replace(name=f"chunk {task}/{point.name}")


def _points(line: Mapping[str, Any], attempt: int) -> Iterator[Point]:
    step, kind = line.get("step"), line.get("kind")
    if isinstance(step, bool):
        return
    with suppress(TargetError):  # as `muster.log` does not write it
        step, time_s = step_of_line(step), _possible(line.get(TIME))
        for name, value in line.items():
            if name not in _ABOUT and isinstance(value, int | float):
                with suppress(TargetError):
                    number = as_number(name, value)
                    yield Point(f"{kind}/{name}" if kind else name, step, time_s, number, attempt)


def _possible(when: Any) -> float:
    is_time = isinstance(when, int | float) and 0 <= when <= LATEST_S
    return float(when) if is_time else time.time()


def _ending(word: str) -> Ending:
    endings: Mapping[str, Ending] = {"done": "done", "failed": "failed", "refused": "failed"}
    return endings.get(word, "stopped")
