"""Bringing the results of other run folders into one: for arrays that have no coordinator."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path
from typing import NamedTuple

from muster.farm.ledger.read import LedgerReader
from muster.farm.ledger.records import TaskRow
from muster.farm.ledger.store import Ledger
from muster.farm.metrics import curves_of, encode
from muster.farm.results import store_value, whole_value
from muster.farm.task import AttemptRecord, Finished, Outcome, SlotSpec, Task, TaskState
from muster.run.folder import RunFolder

_TAIL_BYTES, _MAX_LINES = 4000, 4
_COMPLAINT = "muster: "


@dataclass
class Collected:
    """``num_open``: tasks of elements that have not ended there; ``num_known``: results that were
    here before, from an earlier time or from another element.
    """

    num_new: int = 0
    num_known: int = 0
    num_open: int = 0
    missing: list[int] = field(default_factory=list)  # elements without a ledger
    ended: dict[int, LastWords] = field(default_factory=dict)  # elements that gave up, and why


class LastWords(NamedTuple):
    """The end of what the job of an element printed, and the whole of it."""

    text: str
    path: Path


def element_numbers(main: RunFolder, count: int) -> list[int]:
    """The elements' numbers: those of the last submission, and any that an earlier one left."""
    there = [int(path.name) for path in main.elements.iterdir() if path.name.isdigit()]
    return sorted({*range(count), *there})


def last_words(main: RunFolder, number: int, *, only_ours: bool) -> LastWords | None:
    """The last error that an element's last job printed, or else its last lines; None without any.

    With ``only_ours`` only muster's own errors count, and not what the task or the job's set-up
    printed.
    """
    outputs = list(main.job_files.glob(f"*_{number}.out"))
    if not outputs:
        return None
    path = max(outputs, key=lambda output: output.stat().st_mtime)
    text = path.read_bytes()[-_TAIL_BYTES:].decode("utf-8", "replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    ours = [i for i, line in enumerate(lines) if line.startswith(_COMPLAINT)]
    if ours:
        return LastWords(_one_line(lines[ours[-1] :][:_MAX_LINES]), path)
    return LastWords(_one_line(lines[-_MAX_LINES:]), path) if lines and not only_ours else None


def _one_line(lines: Sequence[str]) -> str:
    return "; ".join(lines).replace(":; ", ": ")


def collect_element(main: RunFolder, ledger: Ledger, number: int, counts: Collected) -> bool:
    """Record what an element has done, by content: a key that is done here stays as it is.

    Returns whether every task that it knows of has ended.
    """
    element = main.element(number)
    if not element.ledger.exists():
        counts.missing.append(number)
        return False
    num_open_before = counts.num_open
    workers: dict[str | None, int] = {}  # by the code that they ran
    slot = SlotSpec(slot_id=number, label=f"element/{number}", devices=())
    with LedgerReader(element.ledger) as reader:
        ledger.begin()
        for row in reader.tasks():
            if row.code not in workers:
                workers[row.code] = worker_id = ledger.next_worker_id()
                log = f"element-{number}.log"
                ledger.worker_started(worker_id, slot, "", log, row.code)
            if row.state not in (TaskState.DONE, TaskState.FAILED):
                counts.num_open += 1
            elif _record(main, element, ledger, reader, row, workers[row.code]):
                counts.num_new += 1
            else:
                counts.num_known += 1
        for worker_id in workers.values():
            ledger.worker_ended(worker_id, "collected")
        ledger.commit()
    return counts.num_open == num_open_before


def _record(
    main: RunFolder,
    element: RunFolder,
    ledger: Ledger,
    reader: LedgerReader,
    row: TaskRow,
    worker_id: int,
) -> bool:
    """Record what one task came to; returns whether it was not known here before."""
    if row.state is TaskState.FAILED and ledger.accepted(row.key.hex())[0] == "failed":
        return False
    task = ledger.take(row.key)
    if task is None:
        return False
    finished = _finished(element, reader, row)
    record = AttemptRecord(
        task.task_id, task.token, worker_id,
        finished._replace(task_id=task.task_id, token=task.token),
    )  # fmt: skip
    _copy_metrics(ledger, reader, row.task_id, task)
    if finished.outcome is not Outcome.OK:
        ledger.record_failed([record])
        return True
    key = row.key.hex()
    ledger.record_done([record], [store_value(main, key, finished.value)])
    if row.has_files and element.artifact(key).exists():
        main.artifact(key).parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(element.artifact(key), main.artifact(key), dirs_exist_ok=True)
    return True


def _copy_metrics(ledger: Ledger, reader: LedgerReader, task_id: int, task: Task) -> None:
    """Record what holds of a task there as what one attempt has logged here."""
    rows = [
        point
        for name, curve in curves_of(reader, task_id).items()
        for point in zip(
            repeat(name), curve.step.tolist(), curve.time_s.tolist(), curve.value.tolist()
        )
    ]
    if rows:
        ledger.record_metrics([(task.task_id, task.token, 1, encode(rows))])


def _finished(element: RunFolder, reader: LedgerReader, row: TaskRow) -> Finished:
    is_done = row.state is TaskState.DONE
    value = whole_value(element, row.key.hex(), row.state, row.value)
    return Finished(
        row.task_id,
        0,
        Outcome.OK if is_done else Outcome(row.outcome or Outcome.LOST),
        row.started_s or 0.0,
        row.seconds or 0.0,
        0,
        0,
        row.peak_mib,
        value,
        row.message or "",
        "" if is_done else reader.trace_of(row.task_id) or "",
        files=row.has_files,
    )
