"""A cancel that comes after the last task has ended."""

from __future__ import annotations

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
from muster.farm.ledger.store import Ledger
from muster.farm.plan import Plan, Request
from muster.farm.task import NewTask, SlotSpec, TargetSpec, TaskState
from muster.run.folder import RunFolder

SOURCE = """
import pathlib

def work(x):
    pathlib.Path("began").touch()
    return {"y": x}
"""


def test_it_cancels_nothing_and_the_run_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.py").write_text(SOURCE)
    folder = RunFolder(tmp_path / "run")
    folder.create()
    ledger = Ledger(folder.ledger)
    ledger.begin()
    number = ledger.target_id("work")
    ledger.commit()
    spec = TargetSpec(name="work", location="t.py", attribute="work", base_folder=str(tmp_path))
    payload, key = payload_and_key("work")({"x": 1})
    plan = Plan(
        folder=folder,
        targets={number: spec},
        slots=(SlotSpec(slot_id=0, label="cpu0", devices=()),),
        policy=Policy(),
        total=1,
        feed=iter([NewTask(key, number, payload)]),
    )
    asked: list[Request] = []

    def requests() -> list[Request]:
        """One cancel, as soon as the result of the only task is in the ledger."""
        if asked or not ledger.counts()[TaskState.DONE]:
            return []
        asked.append(Request.CANCEL)
        return asked

    clock = SystemClock()
    journal = Journal(folder.events, clock)
    executor = InlineExecutor(Assignment(folder=folder, run_id="late", targets={number: spec}))
    ending = Coordinator(plan, ledger, executor, journal, Alone(requests)).run()
    journal.close()
    ledger.close()
    assert asked, "the test asked too late"
    assert {state: n for state, n in ending.counts.items() if n} == {TaskState.DONE: 1}
    assert not ending.cancelled
