"""What comes before the first workers of a run, and what is heard more than once."""

from __future__ import annotations

import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from tests.unit.farm.alone import Alone

from muster.base.clock import SystemClock
from muster.base.journal import Journal
from muster.farm.canonical import payload_and_key
from muster.farm.coordinator import Coordinator
from muster.farm.decisions import Policy
from muster.farm.events import Event, WorkerDied
from muster.farm.executors.base import Assignment
from muster.farm.executors.inline import InlineExecutor
from muster.farm.executors.local import LocalExecutor
from muster.farm.ledger.store import Ledger
from muster.farm.plan import Plan, Request
from muster.farm.task import HeldWorker, NewTask, SlotSpec, TargetSpec
from muster.run.folder import RunFolder

SLOT = SlotSpec(slot_id=0, label="cpu0", devices=())


class Noting(InlineExecutor):
    """Notes in which order it is asked to start workers and to say what has happened."""

    asked: list[str]

    def start(self, worker_id: int, slot: SlotSpec) -> str:
        self.asked.append("start")
        return super().start(worker_id, slot)

    def poll(self, timeout_s: float) -> list[Event]:
        self.asked.append("poll")
        return super().poll(timeout_s)


class Rig:
    def __init__(
        self,
        tmp_path: Path,
        requests: Callable[[], list[Request]] = list,
        held: Mapping[int, HeldWorker] | None = None,
    ) -> None:
        (tmp_path / "t.py").write_text("def work(x):\n    return {'y': x}\n")
        self.folder = RunFolder(tmp_path / "run")
        self.folder.create()
        self.ledger = Ledger(self.folder.ledger)
        self.ledger.begin()
        number = self.ledger.target_id("work")
        self.ledger.commit()
        spec = TargetSpec(name="work", location="t.py", attribute="work", base_folder=str(tmp_path))
        payload, key = payload_and_key("work")({"x": 1})
        plan = Plan(
            folder=self.folder,
            targets={number: spec},
            slots=(SLOT,),
            policy=Policy(),
            total=1,
            feed=iter([NewTask(key, number, payload)]),
            held=held or {},
        )
        clock = SystemClock()
        self.journal = Journal(self.folder.events, clock)
        self.executor = Noting(Assignment(folder=self.folder, run_id="r", targets={number: spec}))
        self.executor.asked = []
        self.coordinator = Coordinator(
            plan, self.ledger, self.executor, self.journal, Alone(requests)
        )

    def close(self) -> None:
        self.journal.close()
        self.ledger.close()


def test_no_worker_is_started_for_who_has_stopped_the_run_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = [[Request.STOP]]
    rig = Rig(tmp_path, lambda: asked.pop() if asked else [])
    ending = rig.coordinator.run()
    rig.close()
    assert ending.interrupted
    assert "start" not in rig.executor.asked


def test_what_happened_while_tasks_were_listed_is_known_in_the_first_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker of an earlier coordinator is gone: another one is started in its slot at once."""
    monkeypatch.chdir(tmp_path)
    rig = Rig(tmp_path, held={0: HeldWorker(7, [])})
    rig.coordinator._early = [WorkerDied(7, 0, None, "ended")]
    rig.coordinator.run()
    rig.close()
    assert rig.executor.asked[0] == "start"


def test_a_cancel_that_is_seen_again_is_not_written_again(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    for now in (0.0, 10.0, 20.0):
        rig.coordinator._heard = [Request.CANCEL]
        rig.coordinator._outside(now)
    rig.close()
    text = "".join(path.read_text() for path in rig.folder.path.glob("events*"))
    assert text.count('"wish"') == 1


@pytest.fixture
def executor(tmp_path: Path) -> Iterator[LocalExecutor]:
    (tmp_path / "t.py").write_text("def work(x):\n    return {'y': x}\n")
    spec = TargetSpec(name="work", location="t.py", attribute="work", base_folder=str(tmp_path))
    folder = RunFolder(tmp_path / "run")
    folder.create()
    made = LocalExecutor(
        Assignment(folder=folder, run_id="first" + secrets.token_hex(12), targets={1: spec})
    )
    try:
        yield made
    finally:
        made.close()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there is no reaper")
def test_a_reaper_is_there_while_the_first_worker_is_waited_for(executor: LocalExecutor) -> None:
    executor.start(1, SLOT)
    pid = executor._workers[1].process.pid
    os.kill(pid, signal.SIGSTOP)  # it says nothing
    waiting = threading.Thread(target=executor.poll, args=(300.0,))
    waiting.start()
    try:
        until_s = time.monotonic() + 120.0
        while executor._reaper._process is None and time.monotonic() < until_s:
            time.sleep(0.01)
        assert executor._reaper._process is not None
        assert waiting.is_alive()
    finally:
        os.kill(pid, signal.SIGKILL)
        waiting.join()
