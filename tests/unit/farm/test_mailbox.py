"""Files as a way for frames: whole, once, in order, whenever the reader looks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.base.clock import Rhythm
from muster.farm import wire
from muster.farm.executors.mailbox import (
    BYE,
    HELLO,
    LEAVING,
    Heartbeat,
    Reader,
    Writer,
    all_boxes,
    boxes_of,
    has_assigned,
    pilot_box,
    read_heartbeat,
    why_leaving,
    write_heartbeat,
)
from muster.farm.task import Outcome
from muster.run.folder import RunFolder

FRAMES = st.lists(st.tuples(st.lists(st.integers() | st.text(max_size=9), min_size=1, max_size=4)
                            .map(lambda items: ["kind", *map(str, items)]),
                            st.binary(max_size=200)), max_size=12)  # fmt: skip


@given(frames=FRAMES, data=st.data())
def test_a_reader_that_looks_at_any_moment_gets_every_frame_once(
    tmp_path_factory: pytest.TempPathFactory,
    frames: list[tuple[list[str], bytes]],
    data: st.DataObject,
) -> None:
    """The writer is seen at any byte: what is torn then is whole at a later look."""
    path = tmp_path_factory.mktemp("box") / "outbox"
    stream = b"".join(wire.pack(list(header), body) for header, body in frames)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    reader, found = Reader(path), []
    for end in [*cuts, len(stream)]:
        path.write_bytes(stream[:end])
        found += reader.receive()
    assert found == frames
    assert reader.offset == len(stream)


@given(frames=FRAMES, cut=st.integers(0, 2000))
def test_reading_goes_on_from_an_offset(
    tmp_path_factory: pytest.TempPathFactory, frames: list[tuple[list[str], bytes]], cut: int
) -> None:
    path = tmp_path_factory.mktemp("box") / "outbox"
    stream = b"".join(wire.pack(list(header), body) for header, body in frames)
    path.write_bytes(stream[:cut])
    first = Reader(path)
    found = first.receive()
    path.write_bytes(stream)
    assert found + Reader(path, first.offset).receive() == frames


def test_a_writer_appends_what_it_gathered(tmp_path: Path) -> None:
    path = tmp_path / "box"
    writer = Writer(path, durable=True)
    assert not writer.flush()
    assert not path.exists()
    writer.add(wire.pack(["a"]))
    writer.add(wire.pack(["b"], b"body"))
    assert writer.flush()
    writer.add(wire.pack(["c"]))
    assert writer.flush()
    assert Reader(path).receive() == [(["a"], b""), (["b"], b"body"), (["c"], b"")]


def test_what_cannot_be_written_is_kept_for_the_next_try(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "missing" / "box", durable=False)
    writer.add(wire.pack(["a"]))
    with pytest.raises(FileNotFoundError):
        writer.flush()
    (tmp_path / "missing").mkdir()
    writer.flush()
    assert Reader(writer.path).receive() == [(["a"], b"")]


def test_a_reader_of_nothing_has_nothing(tmp_path: Path) -> None:
    assert Reader(tmp_path / "missing").receive() == []


def test_pilots_of_a_slot_are_ordered_by_job_then_restart(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for slot_id, job, restart in [(0, 9, 0), (0, 10, 1), (0, 10, 0), (3, 7, 0)]:
        box = pilot_box(folder, slot_id, job, restart)
        box.folder.mkdir(parents=True)
        box.outbox.touch()
    pilot_box(folder, 0, 11, 0).folder.mkdir()  # it has said nothing yet
    (folder.pilots / "jobs").mkdir()
    assert [box.age for box in boxes_of(folder, 0)] == [(9, 0), (10, 0), (10, 1)]
    assert [(box.slot_id, box.job_id) for box in all_boxes(folder)] == [
        (0, 9), (0, 10), (0, 10), (3, 7),
    ]  # fmt: skip
    assert boxes_of(folder, 1) == []


def test_inboxes_are_ordered_by_session(tmp_path: Path) -> None:
    box = pilot_box(RunFolder(tmp_path), 0, 1, 0)
    box.folder.mkdir(parents=True)
    for session in (2, 10, 1):
        box.inbox(session).touch()
    assert [session for session, _ in box.inboxes()] == [1, 2, 10]


@pytest.mark.parametrize("why", ["closed", Outcome.PREEMPTED, Outcome.LOST])
def test_a_pilot_is_over_when_goodbye_is_its_last_word(tmp_path: Path, why: str) -> None:
    box = pilot_box(RunFolder(tmp_path), 0, 1, 0)
    assert not box.is_over
    box.folder.mkdir(parents=True)
    outbox = Writer(box.outbox, durable=False)
    for frame, is_over in [(wire.pack([HELLO, "h", 1]), False), (wire.pack([BYE, why]), True)]:
        outbox.add(frame)
        outbox.flush()
        assert box.is_over == is_over


def test_why_a_pilot_leaves_is_read_from_its_outbox(tmp_path: Path) -> None:
    box = pilot_box(RunFolder(tmp_path), 0, 1, 0)
    assert why_leaving(box) is None
    box.folder.mkdir(parents=True)
    outbox = Writer(box.outbox, durable=False)
    outbox.add(wire.pack([HELLO, "host", 1]) + wire.pack([LEAVING, Outcome.PREEMPTED]))
    outbox.add(wire.pack(["progress", 1, 2, "saves", {}]))
    outbox.flush()
    assert why_leaving(box) is Outcome.PREEMPTED


def test_what_pilots_were_asked_for_with_is_compared_by_value(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert not has_assigned(folder, {})
    folder.pilots.mkdir()
    folder.pilot_assignment.write_text('{"request": {"args": ["a"]}, "patience_s": 3}')
    assert has_assigned(folder, {"request": {"args": ("a",)}})
    assert not has_assigned(folder, {"request": {"args": ("b",)}})


@pytest.mark.parametrize("beat", [Heartbeat(1, 5), Heartbeat(3, 0, is_closed=True)])
def test_a_beat_is_read_as_it_was_written(tmp_path: Path, beat: Heartbeat) -> None:
    folder = RunFolder(tmp_path)
    assert read_heartbeat(folder) == Heartbeat()
    folder.pilots.mkdir()
    write_heartbeat(folder, beat)
    assert read_heartbeat(folder) == beat


def test_looks_are_seldom_after_a_long_silence_and_frequent_after_news() -> None:
    rhythm = Rhythm(100.0, least_s=0.01, most_s=2.0)
    assert rhythm.due_s == 100.0
    for now, due in [(100.0, 100.01), (101.0, 101.05), (120.0, 121.0), (500.0, 502.0)]:
        rhythm.looked(now)
        assert rhythm.due_s == pytest.approx(due)
    rhythm.happened(501.0)
    assert rhythm.due_s == pytest.approx(501.01)
    rhythm.looked(501.01)
    assert rhythm.due_s == pytest.approx(501.02)


_FULL_DISK = """
import os, sys
from pathlib import Path
from muster.farm import wire
from muster.farm.executors.mailbox import Reader, Writer

path, failing, durable = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "durable"
real = {"fsync": os.fsync, "close": os.close, "write": os.write}
state = {"calls": 0, "sure": 0}

def fails(call):
    # As an NFS client with a full server: the pages are gone, and the error comes late.
    def wrapped(handle, *rest):
        state["calls"] += 1
        if state["calls"] in (2, 3):
            if call == "write":
                real["write"](handle, rest[0][:3])
            else:
                os.truncate(path, state["sure"])
            if call == "close":
                real["close"](handle)
            raise OSError(28, "No space left on device")
        done = real[call](handle, *rest)
        state["sure"] = path.stat().st_size
        return done
    return wrapped

setattr(os, failing, fails(failing))
writer = Writer(path, durable=durable)
for number in range(4):
    writer.add(wire.pack(["r", number], b"result"))
    try:
        writer.flush()
    except OSError:
        pass
setattr(os, failing, real[failing])
writer.flush()
print([header[1] for header, _ in Reader(path).receive()])
"""


@pytest.mark.parametrize(
    ("failing", "durable"),
    [("fsync", "durable"), ("close", "durable"), ("close", "cached"), ("write", "durable")],
)
def test_what_a_full_server_refuses_late_is_written_again(
    tmp_path: Path, failing: str, durable: str
) -> None:
    """In a process of its own, whose system calls fail as they do there."""
    words = [sys.executable, "-c", _FULL_DISK, str(tmp_path / "box"), failing, durable]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.stdout == "[0, 1, 2, 3]\n", done.stderr
