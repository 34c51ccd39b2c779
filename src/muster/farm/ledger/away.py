"""A ledger on a local disk, with everything that is acknowledged in the run folder as well.

Whatever dies at whatever moment, even the whole host with its disk, a run that goes on from the run
folder has every result that was acknowledged. A run may be resumed on another host and come back; a
local ledger that has been overtaken is replaced by the run folder's, and never the other way round.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from muster.base.errors import LedgerError
from muster.base.settings import Settings
from muster.farm.decisions import Stopped
from muster.farm.ledger.connect import (
    add_worker_code,
    explained,
    fold_log,
    open_reader,
    put_in_place,
    remove,
)
from muster.farm.ledger.home import (
    Choice,
    Mark,
    both_moved,
    choose,
    choose_place,
    following,
    mark_of,
    read_mark,
    stored,
)
from muster.farm.ledger.queries import MetricRow, SearchRow
from muster.farm.ledger.ship import (
    DONE,
    FAILED,
    TRIED,
    Cancelled,
    Ended,
    Halted,
    Line,
    Noted,
    Parted,
    Recorded,
    Reopened,
    Shipper,
    Started,
    read_segment,
)
from muster.farm.ledger.store import Ledger
from muster.farm.task import AttemptRecord, NewTask, SlotSpec, Task, TaskState
from muster.run.folder import RunFolder
from muster.run.record import own_id


class _AtHome(NamedTuple):
    """What the run folder holds: ``lines`` came after the snapshot; ``mark`` is with them."""

    mark: Mark
    lines: Sequence[Line]


class AwayLedger(Ledger):
    is_away = True

    def __init__(self, path: Path, home: Path) -> None:
        """``home``: where the ledger of the run folder is."""
        self._shipper = Shipper(home)
        self._changes_shipped = -1
        self._must_snapshot = True  # before the first line: a segment may have a torn end
        fold_log(home)
        at_home = _read_home(home)
        if at_home is not None and _is_from_home(path, home, at_home.mark):
            _restore(path, home, at_home)
        super().__init__(path)
        with explained(path, "read"):
            self._mark = read_mark(self._db)
        if not self._mark.branch:
            self._mark = Mark().fork()
        self._expected = at_home.mark.branch if at_home is not None else self._mark.branch
        try:
            if at_home is not None and at_home.mark.branch == self._mark.branch:
                self._must_snapshot = self._shipper.has_segment()
            if self._must_snapshot:
                self.snapshot()
        except BaseException:
            self._db.close()
            raise

    def close(self) -> None:
        try:
            self.snapshot()
        finally:
            self._db.close()

    # ------------------------------------------------------------------ shipping

    def commit(self) -> None:
        if not self._shipper.has_lines:
            super().commit()
            return
        mark = self._mark._replace(shipments=self._mark.shipments + 1)
        self.set_meta(*stored(mark))
        super().commit()
        self._mark = mark
        if self._must_snapshot:
            self._shipper.forget()
            self.snapshot()
            return
        try:
            self._shipper.ship(mark)
        except BaseException:
            self._must_snapshot = True  # lines behind a gap or a torn one would not count
            self._shipper.forget()
            raise
        self._mark = mark._replace(acknowledged=mark.shipments)

    def roll_back(self) -> None:
        super().roll_back()
        self._shipper.forget()

    def snapshot(self) -> None:
        """Bring a copy to the run folder, if anything has changed since the last."""
        if self._db.in_transaction or self._db.total_changes == self._changes_shipped:
            return
        self._refuse_another_coordinators()
        mark = self._mark._replace(shipments=self._mark.shipments + 1)
        self.set_meta(*stored(mark))
        self._mark = mark
        self._shipper.snapshot(self._db)
        self._mark = mark._replace(acknowledged=mark.shipments)
        self._expected = mark.branch
        self._must_snapshot = False
        self._changes_shipped = self._db.total_changes

    def _refuse_another_coordinators(self) -> None:
        """Raise where another host goes on with this run; the folder's lock may not hold there."""
        home = self._shipper.home
        if not home.exists():
            return
        with closing(open_reader(home)) as database, explained(home, "read"):
            branch = read_mark(database).branch
        if branch not in (self._expected, self._mark.branch):
            raise LedgerError(
                f"Another coordinator has gone on with this run: {home} is not the ledger that was "
                "written from here. It is left as it is.",
                hint="end the other one, or this one; results recorded here since then are in "
                f"{self.path}.",
            )

    # ------------------------------------------------------------------ what is shipped

    def record_done(
        self, records: Sequence[AttemptRecord], values: Sequence[tuple[bytes | None, str | None]]
    ) -> None:
        super().record_done(records, values)
        for record, (value, sha) in zip(records, values, strict=True):
            self._shipper.note(Ended(DONE, self.key_of(record.task_id), record, value, sha))

    def record_failed(self, records: Sequence[AttemptRecord]) -> None:
        super().record_failed(records)
        for record in records:
            self._shipper.note(Ended(FAILED, self.key_of(record.task_id), record))

    def record_tried(self, tried: Sequence[tuple[AttemptRecord, Task]]) -> None:
        super().record_tried(tried)
        for record, task in tried:
            self._shipper.note(Ended(TRIED, task.key, record, tries=task.tries))

    def divide(self, task: Task, payload: bytes, given: Sequence[tuple[bytes, bytes]]) -> int:
        added = super().divide(task, payload, given)
        # Without it the result of the smaller task would pass for that of the whole one.
        self._shipper.note(Parted(task.key, payload, task.target_id, tuple(given)))
        return added

    def record_stopped(
        self, stopped: Sequence[Stopped], values: Sequence[bytes], *, has_files: bool = False
    ) -> None:
        super().record_stopped(stopped, values, has_files=has_files)
        for (task, record), value in zip(stopped, values, strict=True):
            files = has_files if record is None else record.finished.files
            self._shipper.note(Halted(task.key, task.token, value, files, record))

    def record_cancelled(self, cancelled: Sequence[Stopped]) -> None:
        super().record_cancelled(cancelled)
        for task, record in cancelled:
            self._shipper.note(Cancelled(task.key, record))

    def cancel_one(
        self, task_id: int, open_states: Collection[TaskState] = (TaskState.READY,)
    ) -> TaskState | None:
        state = super().cancel_one(task_id, open_states)
        if state is None:
            self._shipper.note(Cancelled(self.key_of(task_id)))
        return state

    def reopen_stopped(self, task_ids: Sequence[int]) -> None:
        super().reopen_stopped(task_ids)
        for task_id in task_ids:
            self._shipper.note(Reopened(self.key_of(task_id)))

    def record_search(self, rows: Sequence[SearchRow]) -> None:
        super().record_search(rows)
        for kind, task_id, body in rows:
            key = None if task_id is None else self.key_of(task_id)
            # By its target's name: the numbers of targets may not have come home yet.
            made = self.made_from(task_id) if kind == "proposal" and task_id is not None else ()
            self._shipper.note(Recorded(kind, key, body, *made))

    def record_metrics(self, rows: Sequence[MetricRow]) -> list[MetricRow]:
        new = super().record_metrics(rows)
        for task_id, token, serial, body in new:
            self._shipper.note(Noted(self.key_of(task_id), token, serial, body))
        return new

    def worker_started(
        self, worker_id: int, slot: SlotSpec, host: str, log: str, code: str | None = None
    ) -> None:
        super().worker_started(worker_id, slot, host, log, code)
        self._shipper.note(Started(worker_id, slot, host, log, code))


def open_ledger(folder: RunFolder, settings: Settings) -> Ledger:
    """The writer's ledger of ``folder``: there, or on a local disk with copies shipped there.

    The caller holds the run's lock.
    """
    place = choose_place(folder, own_id(folder).text, settings)
    return AwayLedger(place.path, folder.ledger) if place.is_away else open_at_home(folder.ledger)


def open_at_home(path: Path) -> Ledger:
    """The writer's ledger of a run folder on a local disk.

    It may have been away before: on a host that sees this folder over the network.
    """
    at_home = _read_home(path)
    ledger = Ledger(path)
    if at_home is None or not (at_home.mark.branch or at_home.lines):
        return ledger
    try:
        with explained(path, "write"):
            ledger.begin()
            _replay(ledger, at_home.lines, path)
            # Another branch and one further, so that no ledger elsewhere counts as its equal.
            mark = at_home.mark.fork()
            step = mark.shipments + 1
            ledger.set_meta(*stored(mark._replace(shipments=step, acknowledged=step)))
            ledger.commit()
            path.with_suffix(".segment").unlink(missing_ok=True)
    except BaseException:
        ledger.close()
        raise
    return ledger


def open_whole(path: Path) -> sqlite3.Connection:
    """A connection to look at the ledger of a run folder, with all that was shipped to it."""
    shipments = read_segment(path)  # first: a snapshot made meanwhile contains them
    database = open_reader(path)
    with explained(path, "read"):
        _, lines = following(read_mark(database), shipments)
        if not lines:
            return database
        with closing(database):
            copy = sqlite3.connect(":memory:", isolation_level=None)
            database.backup(copy)
        add_worker_code(copy)
        ledger = Ledger(path, copy)
        ledger.begin()
        _replay(ledger, lines, path)
        ledger.commit()
    return copy


def _read_home(home: Path) -> _AtHome | None:
    if not home.exists():
        return None
    shipments = read_segment(home)
    with closing(open_reader(home)) as database, explained(home, "read"):
        return _AtHome(*following(read_mark(database), shipments))


def _is_from_home(path: Path, home: Path, at_home: Mark) -> bool:
    if not path.exists():
        return True
    choice = choose(at_home, mark_of(path))
    if choice is Choice.REFUSED:
        raise both_moved(home, path)
    return choice is Choice.HOME


def _restore(path: Path, home: Path, at_home: _AtHome) -> None:
    """Make the ledger at ``path`` from the run folder's: beside it, then in one step."""
    beside = path.with_name(f".{path.name}.new")
    with explained(path, "restore"):
        path.parent.mkdir(parents=True, exist_ok=True)
        remove(beside)
        with (
            closing(open_reader(home)) as source,
            closing(sqlite3.connect(beside, isolation_level=None)) as database,
        ):
            source.backup(database)
            # With a rollback journal COMMIT tells of a full disk; closing a log does not.
            database.execute("PRAGMA journal_mode = DELETE")
            ledger = Ledger(path, database)
            ledger.begin()
            ledger.recover()
            _replay(ledger, at_home.lines, home)
            ledger.set_meta(*stored(at_home.mark.fork()))
            ledger.commit()
        put_in_place(beside, path)


def _replay(ledger: Ledger, lines: Iterable[Line], home: Path) -> None:
    ledger.index_keys()  # lines name tasks by them
    for line in lines:
        if isinstance(line, Started):
            ledger.worker_started(*line)
            continue
        if isinstance(line, Recorded):
            _record_again(ledger, line, home)
            continue
        task, is_done = _find(ledger, line.key, home)
        if isinstance(line, Noted):  # of an attempt that may have ended before it arrived
            ledger.record_metrics([(task.task_id, line.token, line.serial, line.body)])
            ledger.use_up_token(task.task_id, line.token)
        elif isinstance(line, Reopened):
            ledger.reopen_stopped([task.task_id])
        elif is_done:
            continue  # the snapshot has it already
        elif isinstance(line, Parted):
            ledger.divide(task, line.payload, line.given)
        elif isinstance(line, Halted):
            _stop_again(ledger, task._replace(token=line.token), line)
        elif isinstance(line, Cancelled):
            _cancel_again(ledger, task, line)
        else:
            _end_again(ledger, task, line)


def _find(ledger: Ledger, key: bytes, home: Path) -> tuple[Task, bool]:
    found = ledger.task_of_key(key)
    if found is None:
        raise LedgerError(
            f"{home.with_suffix('.segment')} names a task that {home} does not know "
            f"({key.hex()[:12]}): going on would lose what belongs to it.",
            hint="go on where the run's own ledger is (the host of its last start), or begin "
            "again in another --run-dir.",
        )
    return found


def _record_again(ledger: Ledger, line: Recorded, home: Path) -> None:
    task_id = None
    if line.key is not None:
        if line.target:
            target_id = ledger.target_id(line.target)
            ledger.add_tasks([NewTask(line.key, target_id, line.payload)])
        task_id = _find(ledger, line.key, home)[0].task_id
    ledger.record_search([SearchRow(line.kind, task_id, line.body)])


def _stop_again(ledger: Ledger, task: Task, line: Halted) -> None:
    record = None if line.record is None else _of_task(task, line.record)
    ledger.retoken([task])
    ledger.record_stopped([Stopped(task, record)], [line.value], has_files=line.has_files)


def _cancel_again(ledger: Ledger, task: Task, line: Cancelled) -> None:
    if line.record is None:
        ledger.cancel_one(task.task_id, (TaskState.READY, TaskState.CLAIMED))
        return
    task = task._replace(token=line.record.token)
    ledger.retoken([task])
    ledger.record_cancelled([Stopped(task, _of_task(task, line.record))])


def _of_task(task: Task, record: AttemptRecord) -> AttemptRecord:
    """A task that was made after the snapshot may have another number there."""
    finished = record.finished._replace(task_id=task.task_id)
    return record._replace(task_id=task.task_id, finished=finished)


def _end_again(ledger: Ledger, task: Task, line: Ended) -> None:
    record = _of_task(task, line.record)
    ledger.retoken([task._replace(token=record.token)])
    if line.kind == DONE:
        ledger.record_done([record], [(line.value, line.sha256)])
    elif line.kind == FAILED:
        ledger.record_failed([record])
    else:
        ledger.record_tried([(record, task._replace(token=record.token + 1, tries=line.tries))])
        ledger.release([task._replace(token=record.token + 1, tries=line.tries)])
