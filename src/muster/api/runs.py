"""Runs to look at and to change: what is in them, what failed, trying again, cancelling."""

from __future__ import annotations

import importlib.util
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muster.api.start.queued_starts import process_to_end
from muster.base.errors import (
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_SOME_FAILED,
    MissingPackageError,
    SetupError,
    UsageError,
)
from muster.base.processes import send_signal
from muster.base.settings import read_settings
from muster.base.shown_text import shell_word
from muster.base.signals import stop_code
from muster.farm.ledger.away import open_ledger
from muster.farm.ledger.read import LedgerReader
from muster.farm.ledger.records import FailureGroup, LogPart
from muster.farm.ledger.store import Ledger
from muster.farm.plan import Ending
from muster.farm.space import Space
from muster.farm.steering import cancel_in
from muster.farm.table_writer import refresh_export
from muster.farm.task import TaskState
from muster.run import session
from muster.run.folder import RunFolder
from muster.run.record import Kind, RunRecord, read_run
from muster.run.requests import ask, ask_to_cancel
from muster.run.session import is_held
from muster.run.state import Tasks, Word, live_picture, state_of

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

    from muster.api.trackers.metrics import Series


@dataclass(frozen=True)
class Status:
    """How a run of any kind stands.

    ``state`` is one word, see `muster.run.state`; ``num_done`` of ``num_total`` ``unit``s are done
    (None: not known, or nothing is counted). ``counts``: tasks, all 0 where there are ranks.
    ``live``: the last picture of a running coordinator, None when none runs. ``training``: what a
    training says of itself.
    """

    name: str
    path: str
    kind: Kind
    state: Word
    is_running: bool
    num_done: int | None
    num_total: int | None
    unit: str
    counts: Mapping[str, int]
    num_retried: int
    is_enqueued: bool
    live: Mapping[str, Any] | None
    training: Mapping[str, Any] | None = None

    @property
    def total(self) -> int:
        return sum(self.counts.values())


class Run:
    """A run folder. Looking at it never disturbs a coordinator that works on it.

    Raises UsageError for a ``path`` that is not a run folder. So do the methods that look at tasks,
    where there are ranks instead, where no task is listed yet, and where ``task`` names none or
    several. ``reopen`` raises SetupError while somebody works on the run.
    """

    def __init__(self, path: str | Path, *, ending: Ending | None = None) -> None:
        self.folder = RunFolder(Path(path))
        self.ending = ending
        if not self.folder.exists():
            raise UsageError(
                f"{path} is not a run folder: it has no run.json.",
                hint="`muster list` shows the runs below ./runs.",
            )

    def __repr__(self) -> str:
        return f"Run({str(self.folder.path)!r})"

    @property
    def path(self) -> Path:
        return self.folder.path

    @property
    def stored(self) -> RunRecord:
        """What ``run.json`` says."""
        return read_run(self.folder)

    @property
    def exit_code(self) -> int:
        """0 all good, 1 some tasks failed or the run paused, 130 interrupted or cancelled, 75 ended
        by TERM, HUP or USR1 with tasks left.
        """
        if self.ending is not None and self.ending.cancelled:
            return EXIT_INTERRUPTED
        if self.ending is not None and self.ending.interrupted:
            return stop_code(self.ending.stop_signal)
        counts = self.counts()
        if counts[TaskState.FAILED] or counts[TaskState.CANCELLED]:
            return EXIT_SOME_FAILED
        is_good = self.ending is None or not (self.ending.paused or self.ending.is_lacking)
        return EXIT_OK if is_good else EXIT_SOME_FAILED

    def counts(self) -> dict[TaskState, int]:
        """Tasks by state, from the ledger; none before they were listed."""
        if self.stored.is_gang or not self.folder.ledger.exists():
            return dict.fromkeys(TaskState, 0)
        with LedgerReader(self.folder.ledger) as ledger:
            return ledger.counts()

    def has_results(self) -> bool:
        """Whether any task has handed over a value."""
        self.expect_tasks()
        with LedgerReader(self.folder.ledger) as ledger:
            return ledger.has_values()

    def has_metrics(self) -> bool:
        """Whether any task has logged a number."""
        self.expect_tasks()
        with LedgerReader(self.folder.ledger) as ledger:
            return bool(ledger.tasks_with_metrics())

    def status(self) -> Status:
        """How the run stands now."""
        stored, is_running = self.stored, is_held(self.folder)
        tasks, num_retried = Tasks(), 0
        if not stored.is_gang and self.folder.ledger.exists():
            with LedgerReader(self.folder.ledger) as ledger:
                tasks = _tasks_in(ledger)
                num_retried = ledger.num_retried()
        state = state_of(self.folder, stored, tasks, is_running=is_running)
        live = live_picture(self.folder) if is_running and not stored.is_gang else None
        running = min(int(live["num_running"]) if live else 0, tasks.open)
        return Status(
            name=self.folder.name,
            path=str(self.path),
            kind=stored.kind,
            state=state.word,
            is_running=is_running,
            num_done=state.num_done,
            num_total=state.num_total,
            unit=state.unit,
            counts={
                "done": tasks.done,
                "failed": tasks.failed,
                "cancelled": tasks.cancelled,
                **({"stopped": tasks.stopped} if tasks.stopped else {}),
                "running": running,
                "waiting": tasks.open - running,
            },
            num_retried=num_retried,
            is_enqueued=tasks.is_whole,
            live=live,
            training=state.training,
        )

    def results(self) -> pa.Table:
        """One row per task as a pyarrow table (``.to_pandas()`` gives a frame)."""
        self.expect_tasks()
        import pyarrow as pa

        from muster.farm.table import batches

        schema, stream = batches(self.folder)
        return pa.Table.from_batches(stream, schema=schema)

    def frame(self) -> pd.DataFrame:
        """``results()`` as a pandas data frame; MissingPackageError without pandas."""
        if importlib.util.find_spec("pandas") is None:
            raise MissingPackageError(
                "A data frame", "pandas", "pandas", instead="use results(), a pyarrow table"
            )
        return self.results().to_pandas()

    def series(self, task: str | None = None) -> Iterator[Series]:
        """What the run has logged over time, of one task (its number or the start of its key) or
        of all: one item per task and metric.
        """
        from muster.api.trackers.metrics import series_of_ranks, series_of_tasks

        if self.stored.is_gang and task is None:
            return series_of_ranks(self.folder)
        self.expect_tasks()
        if task is None:
            progress = series_of_ranks(self.folder) if self.stored.is_map else ()
            return chain(progress, series_of_tasks(self.folder))
        with LedgerReader(self.folder.ledger) as ledger:
            task_id = self.task_number(ledger, task)
        return series_of_tasks(self.folder, task_id)

    def metrics(self, task: str | None = None, name: str | None = None) -> pa.Table:
        """What the run has logged over time as a pyarrow table, one row per point.

        Columns: task, attempt, name, step, time (seconds since 1970), value. ``task``: only this
        one, its number or the start of its key; ``name``: only this metric.
        """
        from muster.api.trackers.metrics import only, table_of

        return table_of(only(self.series(task), name))

    def failures(self) -> list[FailureGroup]:
        """Failed attempts grouped by their traceback."""
        self.expect_tasks()
        with LedgerReader(self.folder.ledger) as ledger:
            return ledger.failures()

    def failed_tasks(self) -> list[str]:
        """The names of the first failed tasks, for a message."""
        self.expect_tasks()
        with LedgerReader(self.folder.ledger) as ledger:
            return ledger.failed_tasks()

    def log(self, task: str | int) -> list[tuple[LogPart, str]]:
        """What each attempt of a task printed. ``task``: its number or the start of its key."""
        return [(part, self._read_log(part)) for part in self.log_parts(task)]

    def log_parts(self, task: str | int) -> list[LogPart]:
        """Where each attempt's output is: its log file, and from where to where."""
        self.expect_tasks()
        with LedgerReader(self.folder.ledger) as ledger:
            return ledger.log_parts(self.task_number(ledger, task))

    def trace(self, task: str | int) -> str | None:
        """The traceback of a task's last failed attempt."""
        self.expect_tasks()
        with LedgerReader(self.folder.ledger) as ledger:
            return ledger.trace_of(self.task_number(ledger, task))

    def export(self, target: str | Path) -> int:
        """Write the table to a .csv, .parquet or .jsonl file; returns the number of rows."""
        from muster.farm.export import export

        return export(self.folder, Path(target))

    def cancel(self) -> bool | None:
        """Cancel what has not ended. True when the process that works on it, its job, or its next
        start, which waited for GPUs, was asked to end, so that the run can go on later; False when
        open tasks were cancelled here; None when there was nothing to cancel, and nothing was
        changed.
        """
        stored = self.stored
        if (start := process_to_end(self.folder.whole)) is not None:
            send_signal(start, signal.SIGTERM)
        if _asked(self.folder):
            return True
        from muster.slurm.commands import cancel as scancel  # here: few runs are cancelled
        from muster.slurm.commands import living_job

        with suppress(SetupError):  # no SLURM here
            if (job := living_job(self.folder)) is not None:
                scancel(job[0])
                return True
        if self.folder.elements_json.exists():  # an array: each element is a run of its own
            elements = sorted(self.folder.elements.glob("[0-9]*"))
            return sum(map(_asked, map(RunFolder, elements))) > 0 or start is not None or None
        counts = self.counts()
        if not (counts[TaskState.READY] or counts[TaskState.CLAIMED]):
            return start is not None or None
        with changing(self.folder) as ledger:
            ledger.cancel_open()
        if not stored.is_map:
            refresh_export(self.folder)
        return False

    def cancel_tasks(self, named: Sequence[str]) -> dict[int, str]:
        """Cancel single tasks, each named by its number or the start of its key; the others go on.

        Returns a word for each task, by its number: "cancelled"; "told" for one that runs, which
        ends as soon as it can and is killed otherwise; "together" for one that runs in one call
        with others and goes on; "was done" and so on for one that had ended. Raises UsageError for
        a map, whose tasks are parts of one output, and SetupError where the process that works on
        the run does not answer.
        """
        self.expect_tasks()
        if self.stored.is_map:
            raise UsageError(
                f"{self.path} is a map: each of its tasks is a part of one output.",
                hint=f"cancel all that has not ended: muster cancel {shell_word(self.path)}",
            )
        if self.folder.elements_json.exists():
            raise UsageError(
                f"{self.path} is an array: each of its elements has tasks of its own.",
                hint=f"muster cancel {shell_word(self.path)}/elements/N --task KEY",
            )
        with LedgerReader(self.folder.ledger) as reader:
            ids = list(dict.fromkeys(self.task_number(reader, one) for one in named))
        if is_held(self.folder):
            answer = ask(self.folder, {"cancel": ids}, lambda: is_held(self.folder))
            if answer is not None:
                return {int(number): str(word) for number, word in answer["tasks"].items()}
        with changing(self.folder) as ledger:
            words = {one: cancel_in(ledger, one, nobody_works=True) for one in ids}
        refresh_export(self.folder)
        return words

    def add(
        self,
        *,
        grid: Mapping[str, Iterable[Any]] | None = None,
        zipped: Mapping[str, Iterable[Any]] | None = None,
        rows: Iterable[Mapping[str, Any]] | None = None,
        seeds: int | Iterable[int] | None = None,
        seed_offset: int = 0,
        priority_column: str = "",
        priority: int = 0,
        allow_changed_code: bool = False,
    ) -> int:
        """Add tasks to a sweep of a function or a command, also while it is at work elsewhere.

        ``grid``, ``zipped``, ``rows`` and ``seeds`` mean what they mean in `muster.sweep`; a task
        that the run has already stays as it is. Returns how many are new. The process that works on
        the run takes them up; where there is none, they wait for the next start, such as `muster
        resume`, or the same call of `muster.sweep`. ``priority``: tasks with a higher one begin
        first, and those of the plan have 0; what ``priority_column`` says of each of ``rows`` is
        added to it. Raises UsageError for a run of another kind and what the target cannot take,
        PlanMismatchError where its code has changed, and SetupError where the process that works on
        the run does not answer.
        """
        from muster.api.sweeps.adding import add_tasks, check_may_grow
        from muster.api.sweeps.plans import workload_over

        check_may_grow(self)
        space = Space.from_values(
            grid=grid, zipped=zipped, rows=rows, seeds=seeds, seed_offset=seed_offset,
            priority_column=priority_column,
        )  # fmt: skip
        workload = workload_over(self, space)
        return add_tasks(
            self, [workload], priority=priority, may_change_code=allow_changed_code
        ).num_new

    def reopen(self, *, cancelled: bool = False) -> int:
        """Make failed (and cancelled) tasks ready again; returns how many."""
        self.expect_tasks()
        with changing(self.folder) as ledger:
            return ledger.reopen([TaskState.FAILED] + [TaskState.CANCELLED] * cancelled)

    def expect_tasks(self) -> None:
        """Raise UsageError where there are ranks instead of tasks, or no ledger yet."""
        stored = self.stored
        if stored.is_gang:
            quoted = shell_word(self.path)
            raise UsageError(
                f"{self.path} is {stored.kind_name}: it has ranks, and no tasks.",
                hint=f"see `muster status {quoted}` and `muster logs {quoted}`.",
            )
        if not self.folder.ledger.exists():
            raise UsageError(
                f"{self.path} has not begun: none of its tasks is listed yet.",
                hint=f"start it with: muster resume {shell_word(self.path)}",
            )

    def task_number(self, ledger: LedgerReader, task: str | int) -> int:
        """The task's number in the ledger; UsageError where none or several tasks are meant."""
        found = ledger.find(str(task))
        if not found:
            raise UsageError(
                f"There is no task {task!r} in {self.folder.name}.",
                hint="a task is named by its number or by the start of its key, "
                "as in the column `task` of results.csv.",
            )
        if len(found) > 1:
            raise UsageError(f"{task!r} is the start of several task keys; write more of it.")
        return found[0][0]

    def _read_log(self, part: LogPart) -> str:
        path = self.folder.logs / part.log
        try:
            with path.open("rb") as log:
                log.seek(part.start)
                return log.read(max(0, part.end - part.start)).decode("utf-8", "replace")
        except OSError:
            return ""


@contextmanager
def changing(folder: RunFolder) -> Iterator[Ledger]:
    """The ledger of a run that nobody works on, for one change, which is made whole or not at all.

    Raises SetupError while somebody works on the run.
    """
    with session.open_run(folder), closing(open_ledger(folder, read_settings())) as ledger:
        ledger.begin()
        yield ledger
        ledger.commit()


def _tasks_in(ledger: LedgerReader) -> Tasks:
    counts = ledger.counts()
    return Tasks(
        done=counts[TaskState.DONE],
        failed=counts[TaskState.FAILED],
        cancelled=counts[TaskState.CANCELLED],
        open=counts[TaskState.READY] + counts[TaskState.CLAIMED],
        is_whole=ledger.meta("enqueued") is not None,
        stopped=counts[TaskState.STOPPED],
    )


def _asked(folder: RunFolder) -> bool:
    """Whether somebody works on this folder, and was asked to cancel what it does."""
    return is_held(folder) and ask_to_cancel(folder, lambda: is_held(folder))
