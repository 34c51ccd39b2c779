"""A pilot as a plain process, and what the coordinator's side makes of its files."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import orjson
import pytest

from muster.farm import canonical, metrics, wire
from muster.farm.events import (
    Divided,
    Event,
    Logged,
    Results,
    Returned,
    WorkerDied,
    WorkerLeaving,
    WorkerReady,
)
from muster.farm.executors import remote
from muster.farm.executors.base import HeldWorker
from muster.farm.executors.cluster import ClusterRequest
from muster.farm.executors.cluster_slot import ClusterSlot
from muster.farm.executors.mailbox import (
    BYE,
    HELLO,
    LEAVING,
    Heartbeat,
    PilotBox,
    Reader,
    Writer,
    pilot_box,
    write_heartbeat,
)
from muster.farm.ledger.store import Ledger
from muster.farm.task import Finished, NewTask, Outcome, SlotSpec, TargetSpec, Task
from muster.farm.work import settle, survey
from muster.run.folder import RunFolder

SOURCE = """
import time
from pathlib import Path

def echo(x: int):
    return {"x": x}

def saving(x: int, ctx):
    for _ in range(600):
        Path(ctx.run_path, "began").touch()
        time.sleep(0.05)
        ctx.checkpoint({"x": x})

def patient(x: int, ctx):
    while not Path(ctx.run_path, "go").exists():
        Path(ctx.run_path, "began").touch()
        time.sleep(0.02)
    return {"x": x}
"""
SLOT = SlotSpec(slot_id=0, label="slurm/0", devices=())
REQUEST = ClusterRequest(num_workers=2)
T = TypeVar("T")
_LIMIT_S = 300.0


class Yard:
    """A run folder, pilots of its slot 0, and the slot that talks to them."""

    def __init__(self, path: Path) -> None:
        self.folder = RunFolder(path / "run")
        self.folder.create()
        self.folder.pilots.mkdir()
        self.source = path / "target.py"
        self.source.write_text(SOURCE)
        self.processes: list[subprocess.Popen[bytes]] = []
        self.events: list[Event] = []
        self.slot = ClusterSlot(self.folder, 0, session=1, least_s=0.004)
        self.targets: dict[int, TargetSpec] = {}
        self.is_beating = False  # the coordinator is there while something is waited for

    def assign(self, attribute: str, patience_s: float = 60.0, lead_s: float = 60.0) -> None:
        spec = TargetSpec(
            name=attribute, location=str(self.source), attribute=attribute,
            base_folder=str(self.source.parent),
        )  # fmt: skip
        self.targets = {1: spec}
        record = {
            "run_id": "r", "patience_s": patience_s, "lead_s": lead_s, "look_every_s": 0.004,
            **REQUEST.needs_of_pilots(self.targets),
        }  # fmt: skip
        self.folder.pilot_assignment.write_bytes(orjson.dumps(record))
        self.beat(Heartbeat(1, 1))

    def beat(self, beat: Heartbeat) -> None:
        write_heartbeat(self.folder, beat)

    def pilot(self, job: int = 1, restart: int = 0) -> subprocess.Popen[bytes]:
        words = [str(self.folder.path), "0", str(job), str(restart)]
        process = subprocess.Popen([sys.executable, "-m", "muster.farm.pilot", *words])
        self.processes.append(process)
        return process

    def box(self, job: int = 1) -> PilotBox:
        return pilot_box(self.folder, 0, job, 0)

    def until(self, found: Callable[[], T]) -> T:
        deadline = time.monotonic() + _LIMIT_S
        while not (value := found()):
            assert time.monotonic() < deadline, f"not within {_LIMIT_S} s: {self.events}"
            self.events += self.slot.look(time.monotonic())
            if self.is_beating:
                self.beat(Heartbeat(1, int(10 * time.monotonic())))
            time.sleep(0.005)
        return value

    def of(self, kind: type[T]) -> list[T]:
        return [event for event in self.events if isinstance(event, kind)]

    def ready(self, worker_id: int = 1) -> None:
        self.slot.start(worker_id, SLOT)
        self.until(lambda: any(e.worker_id == worker_id for e in self.of(WorkerReady)))

    def send(self, *tasks: Task) -> None:
        self.slot.order(1, remote.send_command(1, tasks, together=False))
        self.events += self.slot.look(time.monotonic())

    def began(self) -> None:
        self.until((self.folder.path / "began").exists)


def task(number: int, token: int = 1) -> Task:
    return Task(number, number.to_bytes(16, "big"), 1, canonical.encode({"x": number}), 0, token)


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[Yard]:
    yard = Yard(tmp_path)
    yield yard
    if yard.folder.pilots.exists():
        yard.beat(Heartbeat(99, 0, is_closed=True))
    for process in yard.processes:
        try:
            process.wait(timeout=_LIMIT_S)
        finally:
            process.kill()
            process.wait()


def test_a_worker_that_is_asked_for_before_there_is_a_pilot_starts_when_one_comes(
    yard: Yard,
) -> None:
    yard.assign("echo")
    yard.slot.start(1, SLOT)
    assert yard.slot.has_waiting
    yard.pilot()
    yard.until(lambda: yard.of(WorkerReady))
    assert not yard.slot.has_waiting
    yard.send(task(1), task(2))
    yard.until(lambda: sum(len(e.finished) for e in yard.of(Results)) == 2)


def test_a_warned_pilot_hands_back_what_has_not_begun_and_the_task_saves(yard: Yard) -> None:
    yard.assign("saving")
    process = yard.pilot()
    yard.ready()
    yard.send(task(1), task(2), task(3))
    yard.began()
    process.send_signal(signal.SIGUSR2)
    yard.until(lambda: yard.of(WorkerDied))
    [leaving] = yard.of(WorkerLeaving)
    [returned] = yard.of(Returned)
    [results] = yard.of(Results)
    [death] = yard.of(WorkerDied)
    assert yard.events.index(leaving) < yard.events.index(results)
    assert list(returned.task_ids) == [2, 3]
    assert [(f.task_id, f.outcome) for f in results.finished] == [(1, Outcome.JOB_TIMEOUT)]
    assert death.outcome is Outcome.JOB_TIMEOUT
    assert yard.folder.checkpoint(task(1).key.hex()).exists()
    assert process.wait(timeout=_LIMIT_S) == 0


def test_a_warned_pilot_hands_back_what_it_gets_too_late(yard: Yard) -> None:
    yard.assign("patient")
    process = yard.pilot()
    yard.ready()
    yard.send(task(1))
    yard.began()
    process.send_signal(signal.SIGUSR2)
    yard.until(lambda: yard.of(WorkerLeaving))
    yard.send(task(2))
    yard.until(lambda: [2] in [list(e.task_ids) for e in yard.of(Returned)])
    (yard.folder.path / "go").touch()
    yard.until(lambda: yard.of(WorkerDied))
    [results] = yard.of(Results)
    assert [(f.task_id, f.outcome) for f in results.finished] == [(1, Outcome.OK)]


def test_a_task_that_does_not_save_is_ended_in_time(yard: Yard) -> None:
    yard.assign("patient", lead_s=1.0)
    process = yard.pilot()
    yard.ready()
    yard.send(task(1))
    yard.began()
    process.send_signal(signal.SIGUSR2)
    yard.until(lambda: yard.of(WorkerDied))
    [death] = yard.of(WorkerDied)
    assert (death.outcome, death.signal) == (Outcome.JOB_TIMEOUT, signal.SIGKILL)
    assert process.wait(timeout=_LIMIT_S) == 0


@pytest.mark.thorough
def test_a_pilot_without_a_coordinator_finishes_what_it_holds_and_ends(yard: Yard) -> None:
    yard.assign("patient", patience_s=4.0)
    process = yard.pilot()
    yard.is_beating = True
    yard.ready()
    yard.send(task(1))
    yard.began()
    yard.is_beating = False
    time.sleep(5.0)  # the coordinator is silent for longer than that
    assert process.poll() is None, "it holds a task"
    (yard.folder.path / "go").touch()
    assert process.wait(timeout=_LIMIT_S) == 0
    left = survey(yard.folder)
    assert [(w, f.task_id, f.outcome) for w, f in left.finished] == [(1, 1, Outcome.OK)]
    assert left.pilots == []


def test_a_pilot_ends_with_its_run_folder(yard: Yard) -> None:
    yard.assign("echo")
    process = yard.pilot()
    yard.ready()
    yard.folder.pilots.rename(yard.folder.path / "elsewhere")
    yard.slot = ClusterSlot(yard.folder, 0, session=1, least_s=0.004)
    process.send_signal(signal.SIGUSR2)
    assert process.wait(timeout=_LIMIT_S) != 0


def test_a_second_coordinator_goes_on_with_what_the_first_has_sent(yard: Yard) -> None:
    """Also with what the pilot had not read yet when the first was killed."""
    yard.assign("patient")
    pilot = yard.pilot()
    yard.ready()
    yard.send(task(1))
    yard.began()
    pilot.send_signal(signal.SIGSTOP)
    last = Writer(yard.box().inbox(1), durable=False)
    last.add(remote.send_command(1, [task(2)], together=False))
    last.flush()
    [left] = survey(yard.folder).pilots
    assert left.worker == HeldWorker(1, [task(1), task(2)])
    yard.beat(Heartbeat(2, 1))
    time.sleep(1.5)  # it will see the new beat and its old inbox in one look
    pilot.send_signal(signal.SIGCONT)
    yard.events.clear()
    yard.slot = ClusterSlot(yard.folder, 0, session=2, least_s=0.004)
    yard.slot.adopt(left)
    (yard.folder.path / "go").touch()
    yard.send(task(3))
    yard.until(lambda: sum(len(e.finished) for e in yard.of(Results)) == 3)
    assert [f.task_id for e in yard.of(Results) for f in e.finished] == [1, 2, 3]
    assert yard.of(WorkerReady) == [], "the worker is the one that was there"


@pytest.mark.thorough
def test_an_older_coordinator_that_beats_again_is_not_heard(yard: Yard) -> None:
    yard.assign("patient")
    yard.beat(Heartbeat(2, 1))
    yard.slot = ClusterSlot(yard.folder, 0, session=2, least_s=0.004)
    yard.pilot()
    yard.ready()
    yard.send(task(1))
    (yard.folder.path / "go").touch()
    yard.until(lambda: yard.of(Results))
    for beat in (Heartbeat(1, 99), Heartbeat(1, 100), Heartbeat(2, 2)):
        yard.beat(beat)
        time.sleep(1.5)  # it looks every second
    yard.send(task(2))
    yard.until(lambda: sum(len(e.finished) for e in yard.of(Results)) >= 2)
    assert [f.task_id for e in yard.of(Results) for f in e.finished] == [1, 2]
    assert len(yard.of(WorkerReady)) == 1, "no second worker was started"


def test_a_newer_pilot_takes_the_place_of_one_that_is_lost(yard: Yard) -> None:
    yard.assign("patient")
    first = yard.pilot(job=1)
    yard.ready()
    yard.send(task(1))
    yard.began()
    first.kill()
    yard.events += yard.slot.lost(Outcome.LOST, "its job 1_0 lost its node")
    [death] = yard.of(WorkerDied)
    assert (death.outcome, death.reason) == (Outcome.LOST, "its job 1_0 lost its node")
    yard.pilot(job=2)
    yard.ready(2)


# ------------------------------------------------------------------ what was left


def finished(number: int, outcome: Outcome = Outcome.OK, token: int = 1) -> Finished:
    return Finished(number, token, outcome, 0.0, 0.1, 0, 0, None, b'{"y":1}')


def leave(yard: Yard, sent: list[Task], events: list[Event], *, job: int = 1) -> None:
    """The files of a pilot with worker 1 that was sent these tasks and said this."""
    box = yard.box(job)
    box.folder.mkdir(parents=True)
    inbox, outbox = Writer(box.inbox(1), durable=False), Writer(box.outbox, durable=False)
    inbox.add(remote.start_command(1, SLOT) + remote.send_command(1, sent, together=False))
    outbox.add(wire.pack([HELLO, "host", 1]))
    for event in events:
        outbox.add(remote.pack_event(event))
    inbox.flush()
    outbox.flush()


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    """Four tasks that are claimed with token 1."""
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.begin()
    ledger.target_id("t")
    ledger.add_tasks(NewTask(task(n).key, 1, task(n).payload) for n in (1, 2, 3, 4))
    ledger.claim(4)
    ledger.commit()
    yield ledger
    ledger.close()


def states(ledger: Ledger) -> list[str]:
    return [ledger.accepted(task(n).key.hex())[0] for n in (1, 2, 3, 4)]


def settled(yard: Yard, ledger: Ledger, request: ClusterRequest | None = REQUEST) -> list[object]:
    ledger.begin()
    left = settle(yard.folder, ledger, request, yard.targets)
    ledger.commit()
    return [pilot.worker for pilot in left]


def test_what_is_done_is_recorded_and_what_is_held_stays_claimed(
    yard: Yard, ledger: Ledger
) -> None:
    yard.assign("echo")
    leave(
        yard, [task(1), task(2), task(3)],
        [WorkerReady(1, 7), Results(1, [finished(1)]), Returned(1, [3])],
    )  # fmt: skip
    assert settled(yard, ledger) == [HeldWorker(1, [task(2)])]
    assert states(ledger) == ["done", "claimed", "open", "open"]


def test_settling_twice_changes_nothing_more(yard: Yard, ledger: Ledger) -> None:
    yard.assign("echo")
    leave(yard, [task(1), task(2)], [Results(1, [finished(1)])])
    assert settled(yard, ledger) == settled(yard, ledger)
    assert states(ledger) == ["done", "claimed", "open", "open"]


def test_a_result_for_an_older_claim_is_not_recorded(yard: Yard, ledger: Ledger) -> None:
    yard.assign("echo")
    leave(yard, [task(1, 0), task(2)], [Results(1, [finished(1, token=0), finished(2)])])
    settled(yard, ledger)
    assert states(ledger) == ["open", "done", "open", "open"]


def test_no_attempt_gets_the_token_of_one_that_was_lost_with_its_ledger(
    yard: Yard, ledger: Ledger
) -> None:
    """They were claimed on another host, whose claims have not come home."""
    yard.assign("echo")
    body = metrics.encode([("loss", 0, 0.0, 1.0)])
    told = [Logged(1, 1, 5, 1, body), Results(1, [finished(1, token=5)]), Logged(1, 2, 6, 2, body)]
    leave(yard, [task(1, 5), task(2, 6)], told)
    yard.folder.points.mkdir(exist_ok=True)
    yard.folder.points_of(task(3).key.hex(), 7).touch()
    (yard.folder.points / "no key.1.jsonl").touch()
    settled(yard, ledger, None)
    assert states(ledger) == ["done", "open", "open", "open"]
    ledger.begin()
    assert [claimed.token for claimed in ledger.claim(4)] == [7, 8, 2]
    ledger.commit()


def test_a_failure_that_waited_is_tried_again(yard: Yard, ledger: Ledger) -> None:
    yard.assign("echo")
    leave(yard, [task(1)], [Results(1, [finished(1, Outcome.EXCEPTION)])])
    assert settled(yard, ledger) == [HeldWorker(1, [], is_ready=False)]
    assert states(ledger) == ["open"] * 4


def test_a_task_that_gave_a_part_away_runs_again_with_what_the_ledger_says(
    yard: Yard, ledger: Ledger
) -> None:
    """Whether the parts were recorded cannot be known here, so its result is not trusted."""
    yard.assign("echo")
    division = Divided(1, 1, 1, {"x": 1}, [{"x": 9}])
    leave(yard, [task(1), task(2)], [division, Results(1, [finished(1), finished(2)])])
    settled(yard, ledger)
    assert states(ledger) == ["open", "done", "open", "open"]


def test_a_worker_at_a_task_that_gave_a_part_away_is_not_wanted(yard: Yard, ledger: Ledger) -> None:
    yard.assign("echo")
    leave(yard, [task(1)], [Divided(1, 1, 1, {"x": 1}, [{"x": 9}])])
    ledger.begin()
    [pilot] = settle(yard.folder, ledger, REQUEST, yard.targets)
    ledger.commit()
    assert (pilot.worker, pilot.unwanted) == (None, 1)
    assert states(ledger) == ["open"] * 4


@pytest.mark.parametrize(
    "request_now",
    [None, dataclasses.replace(REQUEST, memory="8G")],
    ids=["run elsewhere", "other resources"],
)
def test_pilots_that_do_not_fit_are_not_gone_on_with(
    yard: Yard, ledger: Ledger, request_now: ClusterRequest | None
) -> None:
    yard.assign("echo")
    leave(yard, [task(1), task(2)], [Results(1, [finished(1)])])
    assert settled(yard, ledger, request_now) == []
    assert states(ledger) == ["done", "open", "open", "open"], "results are kept in any case"


def test_pilots_of_slots_that_are_no_more_are_not_gone_on_with(yard: Yard, ledger: Ledger) -> None:
    yard.assign("echo")
    leave(yard, [task(1)], [])
    assert settled(yard, ledger, dataclasses.replace(REQUEST, num_workers=1)) != []
    yard.folder.pilots_of(0).rename(yard.folder.pilots_of(1))
    assert settled(yard, ledger, dataclasses.replace(REQUEST, num_workers=1)) == []


def test_only_the_last_pilot_of_a_slot_is_gone_on_with(yard: Yard, ledger: Ledger) -> None:
    yard.assign("echo")
    leave(yard, [task(1)], [], job=1)
    leave(yard, [task(2)], [], job=2)
    assert settled(yard, ledger) == [HeldWorker(1, [task(2)], is_ready=False)]
    assert states(ledger) == ["open", "claimed", "open", "open"]


def test_a_pilot_that_said_goodbye_is_over(yard: Yard) -> None:
    yard.assign("echo")
    leave(yard, [task(1)], [])
    last = Writer(yard.box().outbox, durable=False)
    last.add(wire.pack([BYE, "closed"]))
    last.flush()
    assert survey(yard.folder).pilots == []
    leave(yard, [task(1)], [], job=0)
    assert survey(yard.folder).pilots == [], "an earlier one of the slot is not the one to ask"
    assert Reader(yard.box().outbox).receive()[-1] == ([BYE, "closed"], b"")


def test_a_pilot_that_only_began_to_leave_is_gone_on_with(yard: Yard, ledger: Ledger) -> None:
    """It may be killed before it says goodbye; then only SLURM can say that it is over."""
    yard.assign("echo")
    leave(yard, [task(1)], [WorkerReady(1, 7)])
    last = Writer(yard.box().outbox, durable=False)
    last.add(wire.pack([LEAVING, Outcome.PREEMPTED]))
    last.flush()
    assert settled(yard, ledger) == [HeldWorker(1, [task(1)], is_ending=True)]
    [left] = survey(yard.folder).pilots
    yard.slot.adopt(left)
    assert yard.slot.leaving is not None
    assert yard.slot.leaving[0] is Outcome.PREEMPTED
    events = yard.slot.lost(Outcome.LOST, "its job is gone")
    [death] = [event for event in events if isinstance(event, WorkerDied)]
    assert death.outcome is Outcome.PREEMPTED
    yard.slot.start(2, SLOT)
    assert yard.slot.has_waiting
    yard.slot.look(time.monotonic())
    assert yard.slot.has_waiting, "it does not enter the same mailbox again"


def test_a_new_worker_is_not_given_to_a_pilot_that_leaves(yard: Yard) -> None:
    yard.assign("echo")
    leave(yard, [], [WorkerReady(1, 7), WorkerDied(1, 0, None, "ended")])
    last = Writer(yard.box().outbox, durable=False)
    last.add(wire.pack([LEAVING, Outcome.PREEMPTED]))
    last.flush()
    [left] = survey(yard.folder).pilots
    yard.slot = ClusterSlot(yard.folder, 0, session=2, least_s=0.004)
    yard.slot.adopt(left)
    yard.slot.start(2, SLOT)
    yard.slot.look(time.monotonic())
    assert not yard.box().inbox(2).exists()
    last.add(wire.pack([BYE, Outcome.PREEMPTED]))
    last.flush()
    yard.until(lambda: yard.slot.has_waiting)
    assert yard.of(WorkerDied) == [], "it waits for the next pilot"


@pytest.mark.parametrize("visible", [0, 1, 2])
def test_results_of_which_a_part_is_visible_are_heard_whole_later(yard: Yard, visible: int) -> None:
    """NFS may show the first frames of an event before the others."""
    yard.assign("echo")
    leave(yard, [task(1), task(2), task(3)], [WorkerReady(1, 7), Results(1, [finished(3)])])
    whole = remote.pack_event(Results(1, [finished(1), finished(2)]))
    starts = [0]
    for part in ([finished(1)], []):  # the head, then a result after the other
        starts.append(len(whole) - len(b"".join(map(wire.pack_finished, [*part, finished(2)]))))
    outbox = yard.box().outbox
    before = outbox.read_bytes()
    outbox.write_bytes(before + whole[: starts[visible]])
    [left] = survey(yard.folder).pilots
    assert left.heard == len(before)
    assert left.worker is not None
    assert [t.task_id for t in left.worker.tasks] == [1, 2]
    outbox.write_bytes(before + whole)
    yard.slot.adopt(left)
    yard.until(lambda: yard.of(Results))
    assert yard.of(Results) == [Results(1, [finished(1), finished(2)])]
