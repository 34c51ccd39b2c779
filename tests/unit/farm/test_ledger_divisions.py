"""A ledger away from home while tasks are divided: whatever host dies when, no row is lost."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from muster.base.errors import LedgerError
from muster.farm.ledger.away import AwayLedger
from muster.farm.ledger.read import LedgerReader
from muster.farm.task import AttemptRecord, Finished, NewTask, Outcome, SlotSpec, Task, TaskState

ROWS, CHUNK = 40, 20
SLOT = SlotSpec(slot_id=0, label="cpu:0", devices=())


def payload(start: int, stop: int) -> bytes:
    return json.dumps({"start": start, "stop": stop}).encode()


def key(start: int, stop: int) -> bytes:
    return hashlib.blake2b(payload(start, stop), digest_size=16).digest()


class Host:
    """A coordinator's use of the ledger, with a worker that does what it is told at once."""

    def __init__(self, home: Path, local: Path) -> None:
        home.mkdir(exist_ok=True)
        self.segment = home / "ledger.segment"
        self.ledger = AwayLedger(local / "ledger.sqlite", home / "ledger.sqlite")
        self.running: list[Task] = []
        self.acknowledged: set[tuple[int, int]] = set()
        self.ledger.begin()
        self.ledger.recover()
        target = self.ledger.target_id("map")
        self.ledger.worker_started(1, SLOT, "host", "log")
        starts = range(0, ROWS, CHUNK)
        self.ledger.add_tasks(
            NewTask(key(a, a + CHUNK), target, payload(a, a + CHUNK)) for a in starts
        )
        self.ledger.commit()
        self.ledger.snapshot()

    def turn(self, steps: list[tuple[str, int, int]]) -> set[tuple[int, int]]:
        """One transaction; what it has recorded as done."""
        done: set[tuple[int, int]] = set()
        self.ledger.begin()
        for kind, number, cut in steps:
            if kind == "claim" or not self.running:
                self.running += self.ledger.claim(1)
                continue
            position = number % len(self.running)
            task = self.running[position]
            start, stop = _range(task.payload)
            if kind == "divide" and stop - start > 1:
                first = start + 1 + cut % (stop - start - 1)
                middle = (first + stop) // 2
                parts = [(a, b) for a, b in ((first, middle), (middle, stop)) if a < b]
                smaller = task._replace(payload=payload(start, first))
                given = [(key(a, b), payload(a, b)) for a, b in parts]
                self.ledger.divide(smaller, smaller.payload, given)
                self.running[position] = smaller
            elif kind == "fail":
                self.running.pop(position)
                self.ledger.record_failed([_ended(task, Outcome.EXCEPTION, b"{}")])
            elif kind == "done":
                self.running.pop(position)
                self.ledger.record_done(
                    [_ended(task, Outcome.OK, task.payload)], [(task.payload, None)]
                )
                done.add((start, stop))
        self.ledger.commit()
        return done


def _range(text: bytes) -> tuple[int, int]:
    record = json.loads(text)
    return record["start"], record["stop"]


def _ended(task: Task, outcome: Outcome, value: bytes) -> AttemptRecord:
    finished = Finished(task.task_id, task.token, outcome, 1.0, 0.5, 0, 0, None, value)
    return AttemptRecord(task.task_id, task.token, 1, finished)


def ranges(path: Path) -> dict[tuple[int, int], TaskState]:
    with LedgerReader(path) as reader:
        found = {_range(task.payload): task.state for task in reader.tasks()}
        for task in reader.tasks():
            if task.state is TaskState.DONE:
                assert task.value is not None
                assert _range(task.value) == _range(task.payload)
    return found


STEP = st.tuples(
    st.sampled_from(["claim", "divide", "divide", "done", "fail"]),
    st.integers(0, 99),
    st.integers(0, 99),
)
TURNS = st.lists(st.lists(STEP, min_size=1, max_size=3) | st.just("snapshot"), max_size=14)


#: A chunk gives a part of itself away and is done; then its host dies.
SHARED = [[("claim", 0, 0)], [("divide", 0, 4)], [("done", 0, 0)], "snapshot", [("claim", 0, 0)]]


def test_the_part_that_a_finished_chunk_gave_away_is_done_elsewhere() -> None:
    for number in range(len(SHARED) + 1):
        for torn in (0.0, 0.5, 1.0):
            check_death(SHARED[:number], torn, number % 2 == 0)


@pytest.mark.thorough
@settings(max_examples=100)
@example(turns=SHARED[:3], torn=1.0, keeps_old_segment=False)
@given(turns=TURNS, torn=st.floats(0, 1), keeps_old_segment=st.booleans())
def test_whenever_the_host_dies_every_row_is_in_one_task_and_results_stay(
    turns: list[Any], torn: float, keeps_old_segment: bool
) -> None:
    check_death(turns, torn, keeps_old_segment)


def check_death(turns: list[Any], torn: float, keeps_old_segment: bool) -> None:
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        host = Host(place / "home", place / "a")
        sure: set[tuple[int, int]] = set()
        last: set[tuple[int, int]] = set()
        before = 0
        for turn in turns:
            sure |= last
            before, last = _size(host.segment), set()
            if turn == "snapshot":
                old = host.segment.read_bytes() if host.segment.exists() else None
                host.ledger.snapshot()
                if old is not None and keeps_old_segment:  # killed before it was removed
                    host.segment.write_bytes(old)
                before = _size(host.segment)
            else:
                last = host.turn(turn)
        # The host dies while it ships the last transaction; its disk is gone with it.
        after = _size(host.segment)
        if after > before:
            cut = before + int(torn * (after - before))
            with host.segment.open("r+b") as file:
                file.truncate(cut)
            if cut == after:
                sure |= last
        else:
            sure |= last
        shutil.rmtree(place / "a")

        other = Host(place / "home", place / "b")
        found = ranges(place / "b" / "ledger.sqlite")
        covered = sorted(row for start, stop in found for row in range(start, stop))
        assert covered == list(range(ROWS))
        assert sure <= {part for part, state in found.items() if state is TaskState.DONE}
        while turn_done := other.turn([("claim", 0, 0), ("done", 0, 0)]):
            assert not turn_done & sure
        other.ledger.close()
        host.ledger._db.close()


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def test_a_shipped_result_of_an_unknown_task_is_refused(tmp_path: Path) -> None:
    host = Host(tmp_path / "home", tmp_path / "a")
    host.turn([("claim", 0, 0), ("divide", 0, 3)])
    host.turn([("claim", 0, 0), ("claim", 0, 0), ("claim", 0, 0)])
    host.turn([("done", 2, 0)])  # one that the division has made
    lines = host.segment.read_bytes().splitlines(keepends=True)
    host.segment.write_bytes(lines[-1])
    host.ledger._db.close()
    with pytest.raises(LedgerError, match="does not know"):
        Host(tmp_path / "home", tmp_path / "b")
