"""What has changed in a run since the last look, as events for whoever looks at its pages."""

from __future__ import annotations

import time
from collections.abc import Collection
from contextlib import suppress
from typing import Any, NamedTuple

from muster.base.errors import MusterError
from muster.farm.ledger.read import LedgerReader
from muster.farm.metrics import frames_above
from muster.run.folder import RunFolder
from muster.run.session import is_held
from muster.web.content.index import PAGES
from muster.web.content.overview import head
from muster.web.folder import Folder, Folders, stamp_of
from muster.web.query import Query
from muster.web.table import COMMIT_S

#: More than these, and the page is told to fetch again.
_MOST_ROWS = 200
_MOST_FRAMES = 500
_MOST_LOG = 64 * 1024


class Change(NamedTuple):
    """``log``: the task or rank whose log it is about; only pages that show it get it."""

    name: str
    data: dict[str, Any]
    log: str | None = None


class RunPoll:
    """Remembers what it has told. Each look costs a few ``stat`` where nothing has changed."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._files: dict[str, Any] = {}
        self._written_s = 0.0  # when the ledger was last seen to have changed
        self._was_running: bool | None = None
        self.head: dict[str, Any] = {}
        self._frame: int | None = None  # the last one told; None: not read yet
        self._version = self._num_columns = 0  # of the tasks that were told
        self._has_unread_rows = self._has_unread_points = False
        self._logs: dict[str, int] = {}
        self._is_first = True

    def prepare(self) -> None:
        """What takes long the first time: read all tasks, where somebody looks at them. A run that
        goes on is not made to wait for that.
        """
        with suppress(MusterError):
            if self._folder.is_table_wanted and not self._folder.table.is_prepared:
                self._folder.table.prepare(at_once=not _is_running(self._folder.folder))

    def look(self, logs: Collection[str]) -> list[Change]:
        """``logs``: of which tasks or ranks somebody reads the log."""
        try:
            return self._look(logs)
        except Exception:
            self._files, self.head = {}, {}  # so that the next look finds again what has changed
            raise

    def _look(self, logs: Collection[str]) -> list[Change]:
        told: list[Change] = []
        is_running = _is_running(self._folder.folder)
        changed = self._changed_files() | ({"lock"} if is_running != self._was_running else set())
        if changed:
            told += self._heads()
        if changed or self._has_unread_points:
            told += self._points("metrics" in changed or self._has_unread_points)
        if changed or self._has_unread_rows or (self._folder.is_table_wanted and not self._version):
            told += self._rows()
        told += [one for log in logs for one in self._log(log)]
        for log in self._logs.keys() - set(logs):
            del self._logs[log]
        if self._was_running and not is_running:
            told.append(Change("end", {"state": self.head.get("state")}))
        if "lock" in changed and not self._is_first:
            told.append(Change("stale", {"what": "tasks"}))  # what ran waits now, or the reverse
        self._was_running = is_running
        if self._is_first:
            told, self._is_first = [], False
        return told

    def _changed_files(self) -> set[str]:
        run = self._folder.folder
        ledger, log, segment = run.ledger_files
        now = {
            name: stamp_of(path)
            for name, path in (
                ("ledger", ledger), ("wal", log), ("segment", segment), ("status", run.status_json),
                ("metrics", run.metrics), ("events", run.events), ("record", run.run_json),
                ("published", run.published_json), ("results", run.training_results),
            )
        }  # fmt: skip
        changed = {name for name, stamp in now.items() if stamp != self._files.get(name)}
        self._files = now
        # SQLite writes into the log first, and lets others read it afterwards: the change that was
        # just seen may not have been read yet, and be the last one.
        ledger_and_log = {"ledger", "wal"}
        if changed & ledger_and_log:
            self._written_s = time.monotonic()
        elif time.monotonic() - self._written_s < COMMIT_S:
            changed |= ledger_and_log
        return changed

    def _heads(self) -> list[Change]:
        try:
            found = head(self._folder)
        except MusterError:
            found = {}
        except (OSError, LookupError, TypeError, ValueError, AttributeError):
            return []  # half written: the next look finds it whole
        before, self.head = self.head, found
        if not found:
            return [Change("stale", {"what": "gone"})] if before else []
        timeless = {name: value for name, value in found.items() if name != "seconds"}
        if timeless == {name: value for name, value in before.items() if name != "seconds"}:
            return []
        return [Change("counts", found)]

    def _rows(self) -> list[Change]:
        """The rows that have changed, where somebody looks at tasks."""
        if not self._folder.is_table_wanted:
            return []
        table, was_ready = self._folder.table, self._version > 0
        if not table.is_ready:
            return []
        try:
            self._has_unread_rows = True  # until they are read, also where that fails
            self._has_unread_rows = not table.refresh(at_once=False)
        except MusterError:
            return []
        numbers, self._version = table.changed_since(self._version)
        before, self._num_columns = self._num_columns, table.num_columns
        if not was_ready:  # a first page that came from the ledger may lack columns
            return [Change("stale", {"what": "tasks"})] if len(numbers) > _MOST_ROWS else []
        has_more_columns = before != self._num_columns and not numbers  # else the rows name them
        if len(numbers) > _MOST_ROWS or has_more_columns:
            return [Change("stale", {"what": "tasks"})]
        found = table.rows(numbers) if numbers else {"rows": []}
        if not found["rows"]:
            return []
        names = [column["key"] for column in found["columns"]]
        return [Change("rows", {"columns": names, "rows": found["rows"]})]

    def _points(self, has_lines: bool) -> list[Change]:
        """New points of tasks; of ranks only that there are some."""
        try:
            self._has_unread_points = True  # until they are read, also where that fails
            found = self._read_points(has_lines)
            self._has_unread_points = False
            return found
        except MusterError:
            return []

    def _read_points(self, has_lines: bool) -> list[Change]:
        stored = self._folder.run.stored
        if has_lines and (stored.is_gang or stored.is_map):
            return [Change("stale", {"what": "curves"})]
        if stored.is_gang:
            return []
        if not self._folder.folder.ledger.exists():
            self._frame = 0
            return []
        with LedgerReader(self._folder.folder.ledger) as ledger:
            first, last = self._frame, ledger.last_frame()
            if last == first:
                return []
            if first is None or not 0 <= last - first <= _MOST_FRAMES:
                self._frame = last
                return [Change("stale", {"what": "curves"})]
            series: dict[tuple[int, str], tuple[list[int], list[float]]] = {}
            for frame in frames_above(ledger, first):
                points = frame.points
                for which, step, value in zip(
                    points.which.tolist(), points.step.tolist(), points.value.tolist(),
                    strict=True,
                ):  # fmt: skip
                    x, y = series.setdefault((frame.task_id, points.names[which]), ([], []))
                    x.append(step)
                    y.append(value)
                last = max(last, frame.frame_id)
            keys = {
                row.task_id: row.key.hex()[:12]
                for row in ledger.rows_of(sorted({task for task, _ in series}))
            }
            self._frame = last
        return [
            Change("points", {"series": [
                {"task": keys.get(task, ""), "name": name, "x": x, "y": y}
                for (task, name), (x, y) in series.items()
            ]})
        ]  # fmt: skip

    def _log(self, task: str) -> list[Change]:
        """What was printed since the last look."""
        known = self._logs.get(task)
        try:
            query = Query.of(task=task, offset=-1 if known is None else known, limit=_MOST_LOG)
            found = PAGES["log"](self._folder, query)
        except (MusterError, OSError, ValueError, ArithmeticError):
            return []
        if known is None or found["total"] < known:  # it begins now, or was begun anew
            self._logs[task] = found["total"]
            return []
        self._logs[task] = found["end"]
        if not found["text"]:
            return []
        data = {"task": task, **{name: found[name] for name in ("offset", "end", "text")}}
        return [Change("log", data, task)]


class RunsPoll:
    """Whether anything has changed in any of the runs."""

    def __init__(self, folders: Folders) -> None:
        self._folders = folders
        self._seen: Any = None
        self.head: dict[str, Any] = {}

    def prepare(self) -> None:
        return

    def look(self, logs: Collection[str]) -> list[Change]:
        now = [
            (folder.id, _is_running(folder.folder), folder.changed_s(),
             stamp_of(folder.folder.ledger_files[1]))
            for folder in self._folders.all()
        ]  # fmt: skip
        before, self._seen = self._seen, sorted(now)
        return [] if before in (None, self._seen) else [Change("stale", {"what": "runs"})]


def _is_running(folder: RunFolder) -> bool:
    with suppress(OSError):  # another user's, which may not be looked into
        return is_held(folder)
    return False
