"""Results of short tasks are sent many at once, and none is lost or told twice by that."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.ray_cluster import wait_for

from muster.farm import canonical, held_results, wire
from muster.farm.events import Event, Results, WorkerDied, WorkerReady
from muster.farm.executors.base import Assignment
from muster.farm.executors.local import LocalExecutor
from muster.farm.executors.worker_process import Channel, Worker
from muster.farm.task import Finished, Order, Outcome, SlotSpec, TargetSpec, Task
from muster.farm.worker.inbox import Inbox
from muster.run.folder import RunFolder

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="there is no such memory")

SLOT = SlotSpec(slot_id=0, label="cpu0", devices=())
#: The name of a task says what it does; the others behind it wait in its worker.
SOURCE = """
import ctypes, os, pathlib, signal, time

def does(x):
    if x == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if x == 2:
        time.sleep(600)
    if x == 3:  # the interpreter is held all the while, as by an extension
        pathlib.Path(__file__).with_name("holds").touch()
        ctypes.PyDLL(None).sleep(600)
    if x == 4 and not os.fork():
        os._exit(0)
    return {"x": x}
"""


class Rig:
    def __init__(self, folder: Path) -> None:
        (folder / "t.py").write_text(SOURCE)
        spec = TargetSpec(name="d", location="t.py", attribute="does", base_folder=str(folder))
        run = RunFolder(folder / "run")
        run.create()
        self.executor = LocalExecutor(
            Assignment(folder=run, run_id="held" + secrets.token_hex(12), targets={1: spec})
        )
        self.executor.start(1, SLOT)
        self.events: list[Event] = []
        self.until(WorkerReady)

    def until(self, *kinds: type[Event], num_results: int = 0) -> None:
        end_s = time.monotonic() + 60
        while not (
            all(any(isinstance(event, kind) for event in self.events) for kind in kinds)
            and len(self.told()) >= num_results
        ):
            assert time.monotonic() < end_s, self.events
            self.events += self.executor.poll(0.05)

    def send(self, *what: int) -> None:
        tasks = [
            Task(number, number.to_bytes(16, "big"), 1, canonical.encode({"x": x}), 0, 3)
            for number, x in enumerate(what)
        ]
        self.executor.send(1, tasks, together=False)

    def told(self) -> list[int]:
        ended = [f for e in self.events if isinstance(e, Results) for f in e.finished]
        assert all(one.outcome is Outcome.OK for one in ended)
        return [one.task_id for one in ended]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.executor.close()


def test_a_worker_that_is_killed_loses_only_the_task_at_work(rig: Rig) -> None:
    rig.send(*[0] * 40, 1, 0, 0)
    rig.until(WorkerDied)
    assert rig.told() == list(range(40))
    [death] = [event for event in rig.events if isinstance(event, WorkerDied)]
    assert death.signal == signal.SIGKILL


def test_a_result_is_told_while_a_long_task_is_at_work_behind_it(rig: Rig) -> None:
    rig.send(0, 0, 0, 2)
    rig.until(num_results=3)
    assert rig.told() == [0, 1, 2]


@pytest.mark.thorough
def test_a_task_that_holds_the_interpreter_hides_results_only_until_it_is_killed(
    rig: Rig, tmp_path: Path
) -> None:
    rig.send(0, 0, 0, 3)
    wait_for((tmp_path / "holds").exists)
    time.sleep(0.1)  # it is asleep by then
    rig.executor.end(1, kill=True)
    rig.until(WorkerDied)
    assert rig.told() == [0, 1, 2]


def test_a_forked_child_tells_nothing_of_what_waits(rig: Rig) -> None:
    rig.send(*[0] * 10, 4, *[0] * 10)
    rig.until(num_results=21)
    rig.executor.end(1, kill=False)
    rig.until(WorkerDied)
    assert rig.told() == list(range(21))


def _memory() -> held_results.Held:
    descriptor = held_results.make()
    assert descriptor is not None
    return held_results.Held(held_results.share(descriptor))


def _finished(number: int) -> Finished:
    return Finished(number, 1, Outcome.OK, 0.5, 0.25, 0, 0, None, b"[%d]" % number)


def test_results_wait_only_while_there_is_something_to_do() -> None:
    ours, theirs = socket.socketpair()
    held = _memory()
    with ours, theirs:
        ours.setblocking(False)
        inbox = Inbox(theirs, held)
        inbox._add([Order(7, 1, 1, "ab", 1, b"{}"), Order(8, 1, 1, "ab", 1, b"{}")], False)
        inbox._sent_s = time.monotonic() + 60  # none has waited for long
        inbox.send_result(wire.pack_plain(_finished(5)))
        with pytest.raises(BlockingIOError):
            ours.recv(1)
        inbox.send(wire.pack(["progress"]))  # whatever else is said comes behind it
        result, other = wire.unpack(bytearray(ours.recv(1 << 16)))
        assert wire.read_results(*result) == [_finished(5)]
        assert other == (["progress"], b"")
        inbox.take(), inbox.take()
        inbox.send_result(wire.pack_plain(_finished(6)))
        [result] = wire.unpack(bytearray(ours.recv(1 << 16)))
        assert wire.read_results(*result) == [_finished(6)]


def test_a_connection_may_have_any_number() -> None:
    """A program with many open files starts workers whose descriptors have high numbers."""
    import fcntl
    import resource

    ours, theirs = socket.socketpair()
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    number = fcntl.fcntl(theirs, fcntl.F_DUPFD_CLOEXEC, min(most - 1, 2000))
    with ours, theirs, socket.socket(fileno=number) as high:
        inbox = Inbox(high, _memory())
        ours.sendall(wire.pack([wire.STOP]))
        inbox._wait()
        assert high.recv(1 << 16)


def test_what_has_no_room_is_sent_behind_what_waits() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        inbox = Inbox(theirs, _memory())
        inbox._add([Order(7, 1, 1, "ab", 1, b"{}")], False)
        inbox._sent_s = time.monotonic() + 60
        inbox.send_result(wire.pack_plain(_finished(1)))
        large = _finished(2)._replace(value=b"1" * held_results.BYTES)
        inbox.send_result(wire.pack_plain(large))
        channel = Channel(ours, lambda wanted: None)
        [frame] = channel.receive()
        assert wire.read_results(*frame) == [_finished(1), large]


@pytest.mark.parametrize("num_arrived", [0, 1, 2, 3])
@pytest.mark.parametrize("is_torn", [False, True])
@pytest.mark.parametrize("is_read_before", [False, True])
def test_results_that_a_dead_worker_had_just_sent_are_not_told_twice(
    num_arrived: int, is_torn: bool, is_read_before: bool
) -> None:
    """It died after it had sent all or some of what waited, and before it noted that."""
    ours, theirs = socket.socketpair()
    frames = [wire.pack_plain(_finished(number)) for number in range(4)]
    descriptor = held_results.make()
    assert descriptor is not None
    memory = held_results.share(descriptor)
    held = held_results.Held(memory)
    for frame in frames:
        assert held.add(frame)
    worker = Worker(1, SLOT, None, Channel(ours, lambda wanted: None), "log")  # type: ignore[arg-type]
    worker.memory = memory
    events: list[Event] = []
    with ours, theirs:
        theirs.sendall(b"".join(frames[:num_arrived]))
        if is_read_before:
            worker.read(events)
        if is_torn:
            theirs.sendall(frames[num_arrived][:20])
        worker.read(events, is_last=True)
    told = [one.task_id for e in events if isinstance(e, Results) for one in e.finished]
    assert told == [0, 1, 2, 3]
