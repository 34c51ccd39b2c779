"""Bringing the results of other run folders into one: for arrays that have no coordinator."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field

from muster.base.run_folder import RunFolder
from muster.farm.ledger.read import LedgerReader, TaskRow
from muster.farm.ledger.store import Ledger
from muster.farm.model import AttemptRecord, Finished, Outcome, SlotSpec, TaskState
from muster.farm.publish import store_value


@dataclass
class Collected:
    """``num_open``: tasks of elements that have not ended there; ``num_known``: results that were
    here before, from an earlier time or from another element.
    """

    num_new: int = 0
    num_known: int = 0
    num_open: int = 0
    missing: list[int] = field(default_factory=list)  # elements without a ledger


def collect_element(main: RunFolder, ledger: Ledger, number: int, counts: Collected) -> None:
    """Record what an element has done, by content: a key that is done here stays as it is."""
    element = main.element(number)
    if not element.ledger.exists():
        counts.missing.append(number)
        return
    with LedgerReader(element.ledger) as reader:
        ledger.begin()
        worker_id = ledger.next_worker_id()
        slot = SlotSpec(slot_id=number, label=f"element/{number}", devices=())
        ledger.worker_started(worker_id, slot, "", f"element-{number}.log")
        for row in reader.tasks():
            if row.state not in (TaskState.DONE, TaskState.FAILED):
                counts.num_open += 1
            elif _record(main, element, ledger, reader, row, worker_id):
                counts.num_new += 1
            else:
                counts.num_known += 1
        ledger.worker_ended(worker_id, "collected")
        ledger.commit()


def _record(
    main: RunFolder,
    element: RunFolder,
    ledger: Ledger,
    reader: LedgerReader,
    row: TaskRow,
    worker_id: int,
) -> bool:
    """Whether it is news."""
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
    if finished.outcome is not Outcome.OK:
        ledger.record_failed([record])
        return True
    key = row.key.hex()
    ledger.record_done([record], [store_value(main, key, finished.value)])
    if row.has_files and element.artifact(key).exists():
        main.artifact(key).parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(element.artifact(key), main.artifact(key), dirs_exist_ok=True)
    return True


def _finished(element: RunFolder, reader: LedgerReader, row: TaskRow) -> Finished:
    is_done = row.state is TaskState.DONE
    value = row.value if row.value is not None else b"{}"
    if is_done and row.value is None:
        value = element.value(row.key.hex()).read_bytes()
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
