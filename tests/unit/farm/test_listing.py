"""Listing a large plan turn by turn: who stops or cancels meanwhile is heard."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from tests.unit.farm.alone import Alone

from muster.base.clock import SystemClock
from muster.base.journal import Journal
from muster.farm.canonical import payload_and_key
from muster.farm.coordinator import Coordinator
from muster.farm.decisions import Policy
from muster.farm.executors.base import Assignment
from muster.farm.executors.inline import InlineExecutor
from muster.farm.ledger.away import AwayLedger
from muster.farm.ledger.store import Ledger
from muster.farm.plan import Ending, Listing, Plan, Request
from muster.farm.task import NewTask, SlotSpec, TargetSpec, TaskState
from muster.run.folder import RunFolder

TOTAL = 60_000
WORK = "def work(x):\n    return {'y': x}\n"


class Case:
    """A plan of many tasks, of which ``listed`` counts those that were taken."""

    def __init__(
        self,
        place: Path,
        *,
        away: bool = False,
        is_distinct: bool = False,
        pause: tuple[int, float] = (-1, 0.0),
    ) -> None:
        (place / "t.py").write_text(WORK)
        self.folder = RunFolder(place / "run")
        self.folder.create()
        self.ledger: Ledger = (
            AwayLedger(place / "elsewhere", self.folder.ledger)
            if away
            else Ledger(self.folder.ledger)
        )
        self.ledger.begin()
        number = self.ledger.target_id("work")
        self.ledger.commit()
        spec = TargetSpec(name="work", location="t.py", attribute="work", base_folder=str(place))
        self.targets = {number: spec}
        self.listed, self._number, self._pause = 0, number, pause
        self.plan = Plan(
            folder=self.folder,
            targets=self.targets,
            slots=(SlotSpec(slot_id=0, label="cpu0", devices=()),),
            policy=Policy(),
            total=TOTAL,
            feed=self._tasks(),
            is_distinct=is_distinct,
            plan_id="many",
        )

    def _tasks(self) -> Iterator[NewTask]:
        make = payload_and_key("work")
        for x in range(TOTAL):
            payload, key = make({"x": x})
            self.listed += 1
            if x == self._pause[0]:
                time.sleep(self._pause[1])
            yield NewTask(key, self._number, payload)

    def run(self, requests: Callable[[], list[Request]]) -> Ending:
        clock = SystemClock()
        journal = Journal(self.folder.events, clock)
        executor = InlineExecutor(
            Assignment(folder=self.folder, run_id="many", targets=self.targets)
        )
        ending = Coordinator(self.plan, self.ledger, executor, journal, Alone(requests)).run()
        journal.close()
        self.ledger.close()
        return ending


def in_order(*asked: Request) -> Callable[[], list[Request]]:
    """One of these in each turn."""
    left = list(asked)
    return lambda: [left.pop(0)] if left else []


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_turn_ends_by_the_clock_and_the_next_one_goes_on(tmp_path: Path) -> None:
    case = Case(tmp_path, pause=(1_500, 1.2))
    listing = Listing(case.plan, case.ledger)

    def turn() -> int:
        case.ledger.begin()
        num_new = listing.add()
        case.ledger.commit()
        return num_new

    assert turn() == 1_000
    assert turn() == 1_000, "the rest waits for the next turn: this one took too long"
    while listing.goes_on:
        assert turn() <= 10_000
    case.ledger.close()
    assert case.listed == TOTAL


def test_a_signal_ends_the_turn(tmp_path: Path) -> None:
    case = Case(tmp_path)
    listing = Listing(case.plan, case.ledger)
    case.ledger.begin()
    listing.add()
    assert listing.add(lambda: case.listed >= 3_000) == 2_000
    case.ledger.commit()
    case.ledger.close()


def test_a_cancelled_run_knows_all_of_its_tasks(tmp_path: Path) -> None:
    case = Case(tmp_path)
    ending = case.run(in_order(Request.CANCEL))
    assert (ending.cancelled, ending.imbalance, case.listed) == (True, None, TOTAL)
    assert ending.counts[TaskState.CANCELLED] + ending.counts[TaskState.DONE] == TOTAL


def test_a_cancel_after_a_first_stop_lists_the_rest_too(tmp_path: Path) -> None:
    case = Case(tmp_path)
    ending = case.run(in_order(Request.DRAIN, Request.CANCEL))
    assert (ending.imbalance, ending.counts[TaskState.READY]) == (None, 0)


def test_who_stops_while_a_cancelled_run_is_listed_is_heard(tmp_path: Path) -> None:
    case = Case(tmp_path)
    ending = case.run(in_order(Request.CANCEL, Request.DRAIN, Request.STOP))
    assert case.listed < TOTAL
    assert (ending.cancelled, ending.interrupted, ending.imbalance) == (False, True, None)
    assert ending.counts[TaskState.READY] > 0


def format_and_index(path: Path) -> tuple[int, bool]:
    """The format of a ledger, and whether it has the index of keys."""
    with closing(sqlite3.connect(path)) as database:
        version = database.execute("PRAGMA user_version").fetchone()[0]
        rows = database.execute("PRAGMA index_list(tasks)").fetchall()
        return version, "tasks_key" in [row[1] for row in rows]


def test_a_stopped_listing_leaves_a_ledger_that_older_musters_read(tmp_path: Path) -> None:
    case = Case(tmp_path, is_distinct=True)
    seen: list[tuple[int, bool]] = []

    def after_some() -> list[Request]:
        if not 5_000 < case.listed < TOTAL or len(seen) > 2:
            return []
        seen.append(format_and_index(case.folder.ledger))
        return [Request.STOP] if len(seen) == 2 else []

    ending = case.run(after_some)
    assert seen[:2] == [(3, False)] * 2
    assert ending.interrupted and 0 < case.listed < TOTAL
    assert format_and_index(case.folder.ledger) == (1, True)
    again = Case(tmp_path, is_distinct=True)
    ending = again.run(lambda: [Request.STOP] if again.listed == TOTAL else [])
    assert (sum(ending.counts.values()), ending.imbalance) == (TOTAL, None)
    assert format_and_index(case.folder.ledger) == (1, True)


def test_who_stops_while_all_is_listed_ahead_is_heard(tmp_path: Path) -> None:
    """A ledger on another disk than its run folder knows all tasks before any of them begins."""
    case = Case(tmp_path, away=True)
    ending = case.run(in_order(Request.DRAIN))
    assert case.listed < TOTAL
    assert (ending.interrupted, ending.imbalance) == (True, None)
    assert ending.counts[TaskState.READY] == case.listed
