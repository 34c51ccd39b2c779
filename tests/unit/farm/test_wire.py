"""Frames survive any way of cutting the stream."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.farm import wire
from muster.farm.task import Finished, Order, Outcome, Task

TEXT = st.text(st.characters(), max_size=40)  # lone surrogates included
HEADERS = st.lists(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=20), max_size=6
).map(lambda items: ["kind", *items])
FRAMES = st.lists(st.tuples(HEADERS, st.binary(max_size=300)), max_size=8)


@given(FRAMES, st.data())
def test_any_split_of_the_stream_gives_the_same_frames(
    frames: list[tuple[list[object], bytes]], data: st.DataObject
) -> None:
    stream = b"".join(wire.pack(header, body) for header, body in frames)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    buffer = bytearray()
    found = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        buffer += stream[start:end]
        found += list(wire.unpack(buffer))
    assert found == frames
    assert buffer == b""


@given(FRAMES, st.integers(1, 5))
def test_a_torn_end_stays_in_the_buffer(
    frames: list[tuple[list[object], bytes]], missing: int
) -> None:
    stream = b"".join(wire.pack(header, body) for header, body in [*frames, (["last"], b"12345")])
    buffer = bytearray(stream[:-missing])
    assert list(wire.unpack(buffer)) == frames
    buffer += stream[-missing:]
    assert list(wire.unpack(buffer)) == [(["last"], b"12345")]


@given(
    st.builds(
        Finished,
        task_id=st.integers(1, 2**40),
        token=st.integers(1, 1000),
        outcome=st.sampled_from(Outcome),
        started_s=st.floats(0, 1e10),
        seconds=st.floats(0, 1e7),
        log_start=st.integers(0, 2**40),
        log_end=st.integers(0, 2**40),
        peak_mib=st.none() | st.floats(0, 1e6),
        value=st.binary(max_size=200),
        message=TEXT,
        trace=TEXT,
        signal=st.none() | st.integers(1, 64),
        poisoned=st.booleans(),
        files=st.booleans(),
    )
    | st.builds(
        Finished,
        task_id=st.integers(1, 2**40),
        token=st.integers(1, 1000),
        outcome=st.just(Outcome.OK),
        started_s=st.floats(0, 1e10),
        seconds=st.floats(0, 1e7),
        log_start=st.integers(0, 2**40),
        log_end=st.integers(0, 2**40),
        peak_mib=st.none() | st.floats(0, 1e6),
        value=st.binary(max_size=200),
        message=st.just(""),
        trace=st.just(""),
        signal=st.none(),
        poisoned=st.just(False),
        files=st.just(False),
        on_device=st.booleans(),
    )
)
def test_a_result_arrives_as_it_was_sent(sent: Finished) -> None:
    frames = [wire.pack_plain(sent), wire.pack_plain(sent), wire.pack_finished(sent)]
    found = [wire.read_results(*frame) for frame in wire.unpack(bytearray(b"".join(frames)))]
    got, *others = itertools.chain.from_iterable(found)
    assert others == [got, got]
    is_ok = sent.outcome is Outcome.OK
    assert got == sent._replace(
        value=sent.value if is_ok else b"{}",
        message=wire.clean(sent.message),
        trace="" if is_ok else wire.clean(sent.trace),
    )


PLAIN = st.builds(
    lambda number, value: Finished(number, 1, Outcome.OK, 0.5, 0.25, 0, 1, None, value),
    st.integers(1, 2**40),
    st.binary(max_size=80),
)


@given(st.lists(PLAIN | st.tuples(HEADERS, st.binary(max_size=80)), max_size=8), st.data())
def test_results_without_a_header_may_be_torn_anywhere(
    sent: list[Finished | tuple[list[object], bytes]], data: st.DataObject
) -> None:
    """And stand between other frames."""
    stream = b"".join(
        wire.pack_plain(one) if isinstance(one, Finished) else wire.pack(one[0], one[1])
        for one in sent
    )
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    buffer, found = bytearray(), list[object]()
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        buffer += stream[start:end]
        for frame in wire.unpack(buffer):
            found += wire.read_results(*frame) if frame[0][0] == wire.PLAIN else [frame]
    assert found == sent
    assert buffer == b""


def test_what_is_no_result_is_refused_and_not_read_for_ever() -> None:
    with pytest.raises(ValueError, match="no result"):
        list(wire.unpack(bytearray(64)))


@given(
    st.lists(
        st.builds(
            Task,
            task_id=st.integers(1, 2**40),
            key=st.binary(min_size=1, max_size=16),
            target_id=st.integers(1, 9),
            payload=st.binary(max_size=300),
            group=st.integers(0, 2**56),
            token=st.integers(1, 1000),
            tries=st.integers(0, 9),
        ),
        min_size=1,
        max_size=700,
    ),
    st.booleans(),
)
def test_tasks_arrive_as_they_were_sent(tasks: list[Task], together: bool) -> None:
    [(header, body)] = wire.unpack(bytearray(wire.pack_tasks(tasks, together=together)))
    assert header[0] == wire.TASKS
    orders = [
        Order(t.task_id, t.token, t.target_id, t.key.hex(), t.token, t.payload, t.tries)
        for t in tasks
    ]
    assert wire.read_tasks(header, body) == (orders, together)


@pytest.mark.parametrize("letter", ["a", "\x00", "é", "🙂", '"', "\udcff"])
def test_no_message_is_too_long_to_be_sent(letter: str) -> None:
    base = Finished(1, 1, Outcome.EXCEPTION, 0.0, 0.0, 0, 0, math.pi)
    frame = wire.pack_finished(base._replace(message=letter * 100_000, trace=letter * 100_000))
    [(header, body)] = wire.unpack(bytearray(frame))
    got = wire.read_finished(header, body)
    assert got.message
    assert set(got.message) == set(wire.clean(letter))
    assert got.trace == wire.clean(letter) * 100_000


def test_a_header_that_cannot_be_framed_is_refused() -> None:
    with pytest.raises(ValueError, match="body"):
        wire.pack(["x" * 70_000])
