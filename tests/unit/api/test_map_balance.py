"""An output is only written when the chunks account for every row of the source."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from muster.api.maps.publish import check_balance
from muster.base.errors import EXIT_SETUP, SetupError
from muster.farm.ledger.store import Ledger
from muster.farm.task import AttemptRecord, Finished, NewTask, Outcome, SlotSpec
from muster.run.folder import RunFolder


def folder_with(place: Path, chunks: list[tuple[int, int, int]]) -> RunFolder:
    """A run with finished chunks (shard, first row, end), of which each row gave one record."""
    folder = RunFolder(place)
    ledger = Ledger(folder.ledger)
    ledger.begin()
    target = ledger.target_id("map")
    ledger.worker_started(1, SlotSpec(slot_id=0, label="cpu:0", devices=()), "host", "log")
    for number, (order, start, stop) in enumerate(chunks):
        params = json.dumps({"order": order, "start": start, "stop": stop}).encode()
        ledger.add_tasks([NewTask(number.to_bytes(16), target, params)])
        [task] = ledger.claim(1)
        counts = {"rows_in": stop - start, "rows_out": stop - start, "dropped": 0, "rejected": 0}
        value = json.dumps({"order": order, "start": start, "stop": stop, **counts}).encode()
        done = Finished(task.task_id, task.token, Outcome.OK, 1.0, 0.5, 0, 0, None, value)
        ledger.record_done([AttemptRecord(task.task_id, task.token, 1, done)], [(value, None)])
    ledger.commit()
    ledger.close()
    return folder


def test_a_whole_map_is_published(tmp_path: Path) -> None:
    check_balance(folder_with(tmp_path, [(0, 0, 60), (1, 0, 40), (0, 60, 100)]), [100, 40])


@pytest.mark.parametrize(
    "chunks", [[(0, 0, 60), (1, 0, 40)], [(0, 0, 100)], [(0, 0, 100), (1, 0, 40), (1, 30, 40)]]
)
def test_otherwise_the_numbers_are_told_and_the_parts_stay(
    tmp_path: Path, chunks: list[tuple[int, int, int]]
) -> None:
    folder = folder_with(tmp_path, chunks)
    with pytest.raises(SetupError, match="the source has 140 rows, and the finished chunks") as at:
        check_balance(folder, [100, 40])
    assert at.value.exit_code == EXIT_SETUP
    assert "every part is kept" in str(at.value)
