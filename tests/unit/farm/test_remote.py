"""Commands and events survive the way to another process, however the stream is cut."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from muster.farm import wire
from muster.farm.events import (
    Divided,
    Event,
    Logged,
    Progress,
    Results,
    Returned,
    TargetBroken,
    WorkerDied,
    WorkerReady,
)
from muster.farm.executors import remote
from muster.farm.executors.remote import CommandReader, EventReader, pack_event
from muster.farm.task import Finished, Outcome, SlotSpec, Task

IDS = st.integers(1, 2**40)
TEXT = st.text(st.characters(codec="utf-8"), max_size=30)
NUMBERS = st.floats(allow_nan=False, allow_infinity=False)

TASKS = st.builds(
    Task,
    task_id=IDS,
    key=st.binary(min_size=16, max_size=16),
    target_id=st.integers(1, 99),
    payload=st.binary(max_size=80),
    group=st.integers(-(2**31), 2**31),
    token=IDS,
    tries=st.integers(0, 99),
    batch_limit=st.integers(0, 99),
    # What only the scheduler needs stays with it.
    solo=st.just(False),
    avoid=st.just(""),
    losses=st.just(0),
    priority=st.just(0),
    fresh=st.just(False),
)
SLOTS = st.builds(
    SlotSpec,
    slot_id=st.integers(0, 999),
    label=TEXT,
    devices=st.lists(TEXT, max_size=3).map(tuple),
    kind=st.sampled_from(["cpu", "cuda"]),
    visible_devices=st.none() | TEXT,
    num_threads=st.integers(1, 64),
    memory_mib=st.none() | st.integers(0, 2**20),
)
FINISHED = st.builds(
    Finished,
    task_id=IDS, token=IDS, outcome=st.sampled_from(Outcome), started_s=NUMBERS, seconds=NUMBERS,
    log_start=IDS, log_end=IDS, peak_mib=st.none() | NUMBERS, value=st.just(b"{}"), message=TEXT,
    trace=st.just(""), signal=st.none() | st.integers(1, 64), poisoned=st.booleans(),
    files=st.booleans(),
)  # fmt: skip
PLAIN = st.builds(
    Finished,
    task_id=IDS, token=IDS, outcome=st.just(Outcome.OK), started_s=NUMBERS, seconds=NUMBERS,
    log_start=IDS, log_end=IDS, peak_mib=st.none() | NUMBERS, value=st.binary(max_size=9),
    message=st.just(""), trace=st.just(""), signal=st.none(), poisoned=st.just(False),
    files=st.just(False), on_device=st.just(False),
)  # fmt: skip
PARAMS = st.dictionaries(TEXT, st.integers(-99, 99) | TEXT, max_size=3)
EVENTS: st.SearchStrategy[Event] = st.one_of(
    st.builds(WorkerReady, IDS, IDS),
    st.builds(TargetBroken, IDS, TEXT, TEXT),
    st.builds(Results, IDS, st.lists(FINISHED | PLAIN, max_size=4)),
    st.builds(Returned, IDS, st.lists(IDS, max_size=4)),
    st.builds(Progress, IDS, IDS, TEXT, st.dictionaries(TEXT, NUMBERS, max_size=2)),
    st.builds(Logged, IDS, IDS, IDS, IDS, st.binary(max_size=80)),
    st.builds(Divided, IDS, IDS, IDS, PARAMS, st.lists(PARAMS, max_size=3)),
    st.builds(
        WorkerDied, worker_id=IDS, exit_code=st.none() | st.integers(0, 255),
        signal=st.none() | st.integers(1, 64), reason=TEXT, trace=TEXT, host_oom=st.booleans(),
        log_start=IDS, log_end=IDS, stuck=TEXT, outcome=st.none() | st.sampled_from(Outcome),
    ),
)  # fmt: skip


class Recorder:
    """An executor that only notes what it is asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def start(self, worker_id: int, slot: SlotSpec) -> str:
        self.calls.append(("start", worker_id, slot))
        return ""

    def send(self, worker_id: int, tasks: Sequence[Task], *, together: bool) -> None:
        self.calls.append(("send", worker_id, list(tasks), together))

    def share(self, worker_id: int, task_id: int, others: int) -> None:
        self.calls.append(("share", worker_id, task_id, others))

    def stop_task(self, worker_id: int, task_id: int, *, pauses: bool) -> None:
        self.calls.append(("stop_task", worker_id, task_id, pauses))

    def revoke(self, worker_id: int) -> None:
        self.calls.append(("revoke", worker_id))

    def confirm(self, worker_id: int, serial: int) -> None:
        self.calls.append(("confirm", worker_id, serial))

    def end(self, worker_id: int, *, kill: bool) -> None:
        self.calls.append(("end", worker_id, kill))

    def poll(self, timeout_s: float) -> list[Event]:
        return []

    def close(self) -> None:
        return


COMMANDS = st.lists(
    st.one_of(
        st.tuples(st.just("start"), IDS, SLOTS),
        st.tuples(st.just("send"), IDS, st.lists(TASKS, min_size=1, max_size=4), st.booleans()),
        st.tuples(st.just("share"), IDS, IDS, st.integers(1, 99)),
        st.tuples(st.just("revoke"), IDS),
        st.tuples(st.just("stop_task"), IDS, IDS, st.booleans()),
        st.tuples(st.just("confirm"), IDS, IDS),
        st.tuples(st.just("end"), IDS, st.booleans()),
    ),
    max_size=8,
)


def written(call: tuple[Any, ...]) -> bytes:
    match call:
        case ("start", worker_id, slot):
            return remote.start_command(worker_id, slot)
        case ("send", worker_id, tasks, together):
            return remote.send_command(worker_id, tasks, together=together)
        case ("share", worker_id, task_id, others):
            return remote.share_command(worker_id, task_id, others)
        case ("stop_task", worker_id, task_id, pauses):
            return remote.stop_task_command(worker_id, task_id, pauses=pauses)
        case ("revoke", worker_id):
            return remote.revoke_command(worker_id)
        case ("confirm", worker_id, serial):
            return remote.confirm_command(worker_id, serial)
        case ("end", worker_id, kill):
            return remote.end_command(worker_id, kill=kill)
    raise AssertionError(call)


def pieces(stream: bytes, data: st.DataObject) -> list[bytes]:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    edges = [0, *cuts, len(stream)]
    return [stream[a:b] for a, b in itertools.pairwise(edges)]


@given(COMMANDS, st.data())
def test_commands_reach_the_executor_as_they_were_given(
    calls: list[tuple[Any, ...]], data: st.DataObject
) -> None:
    recorder = Recorder()
    reader, buffer = CommandReader(recorder), bytearray()
    for piece in pieces(b"".join(map(written, calls)), data):
        buffer += piece
        reader.apply(wire.unpack(buffer))
    assert recorder.calls == calls
    assert not reader.is_closed
    reader.apply(wire.unpack(bytearray(remote.close_command())))
    assert reader.is_closed


@given(
    st.lists(EVENTS, max_size=6),
    st.sampled_from([wire.pack_finished, wire.pack_plain]),
    st.data(),
)
def test_events_come_back_as_they_were_reported(
    events: list[Event], pack: Callable[[Finished], bytes], data: st.DataObject
) -> None:
    reader, buffer, found = EventReader(), bytearray(), []
    for piece in pieces(b"".join(pack_event(event, pack) for event in events), data):
        buffer += piece
        found += list(reader.read(wire.unpack(buffer)))
    assert found == events
    assert [type(event) for event in found] == [type(event) for event in events]


def test_results_without_headers_belong_to_their_events() -> None:
    done = [Finished(n, 1, Outcome.OK, 1.0, 0.1, 0, 0, 5.0, b'{"i":1}') for n in range(5)]
    events = [Results(1, done[:3]), Results(2, done[3:])]
    stream = b"".join(pack_event(event, wire.pack_plain) for event in events)
    reader, buffer, found = EventReader(), bytearray(), []
    for start in range(0, len(stream), 50):
        buffer += stream[start : start + 50]
        found += list(reader.read(wire.unpack(buffer)))
    assert found == events


def test_an_outcome_is_one_again() -> None:
    death = WorkerDied(1, None, 9, "r", outcome=Outcome.PREEMPTED)
    [found] = EventReader().read(wire.unpack(bytearray(pack_event(death))))
    assert isinstance(found, WorkerDied)
    assert isinstance(found.outcome, Outcome)
