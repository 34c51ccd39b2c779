"""Files and logs as frames: what goes in at one end comes out at the other."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples

from muster.farm import wire
from muster.farm.events import Progress, Results, Returned, TargetBroken, WorkerDied
from muster.farm.executors import ray_files, remote
from muster.farm.executors.ray_files import SENT_HOME, FilesForDriver
from muster.farm.executors.ray_sending import CodeToSend, DriverView, places_of_pilot
from muster.farm.executors.remote import (
    LOG,
    Unpacker,
    is_shipped,
    pack_file,
    pack_folder,
    pack_log,
    write_log,
)
from muster.farm.task import Finished, Outcome, SlotSpec, TargetSpec, Task
from muster.hosts.code import moved_path
from muster.run.folder import RunFolder

KEY = "ab" * 16


def unpack(frames: bytes, root: Path, allowed: tuple[str, ...] = ("there",)) -> list[str]:
    """The places that became whole."""
    unpacker = Unpacker(root, allowed)
    places = [unpacker.take(*frame) for frame in wire.unpack(bytearray(frames))]
    return [place for place in places if place is not None]


def test_a_folder_arrives_with_all_that_is_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "PIECE_BYTES", 10)
    source = tmp_path / "source"
    (source / "a" / "empty").mkdir(parents=True)
    (source / "a" / "long").write_bytes(bytes(range(256)))
    (source / "nothing").touch()
    (source / "tool.sh").write_text("#!/bin/sh\n")
    (source / "tool.sh").chmod(0o755)
    (source / "link").symlink_to("a/long")
    unpack(b"".join(pack_folder(source, "there/it")), tmp_path)
    found = tmp_path / "there" / "it"
    assert (found / "a" / "empty").is_dir()
    assert (found / "a" / "long").read_bytes() == bytes(range(256))
    assert (found / "nothing").read_bytes() == b""
    assert stat.S_IMODE((found / "tool.sh").stat().st_mode) == 0o755
    assert os.readlink(found / "link") == "a/long"
    assert sorted(p.name for p in found.rglob("*")) == sorted(p.name for p in source.rglob("*"))


@given(size=st.integers(0, 40), piece=st.integers(1, 12))
@examples(50)
def test_a_file_of_any_size_is_whole_with_its_last_frame_only(
    tmp_path_factory: pytest.TempPathFactory, size: int, piece: int
) -> None:
    folder = tmp_path_factory.mktemp("pieces")
    (folder / "file").write_bytes(os.urandom(size))
    before, remote.PIECE_BYTES = remote.PIECE_BYTES, piece
    try:
        frames = list(pack_file(folder / "file", "there/file"))
    finally:
        remote.PIECE_BYTES = before
    assert len(frames) == max(1, -(-size // piece))
    for frame in frames[:-1]:
        assert unpack(frame, folder) == []
        assert not (folder / "there" / "file").exists()
    assert unpack(frames[-1], folder) == ["there/file"]
    assert (folder / "there" / "file").read_bytes() == (folder / "file").read_bytes()


def test_a_file_that_is_gone_is_not_sent(tmp_path: Path) -> None:
    assert list(pack_file(tmp_path / "missing", "there/file")) == []


@pytest.mark.parametrize(
    "place", ["../up", "there/../../up", "/etc/passwd", "elsewhere/file", "", "run.json"]
)
def test_a_place_outside_of_what_is_allowed_is_refused(tmp_path: Path, place: str) -> None:
    frame = wire.pack([remote.FILE, place, 0, True, 0o644], b"x")
    root = tmp_path / "root"
    with pytest.raises(ValueError, match="where none belongs"):
        unpack(frame, root)
    assert list(tmp_path.rglob("*")) == []


@pytest.mark.parametrize("behind", ["there/l/file", "there/l/new/file", "there/l", "there"])
def test_a_link_that_was_sent_leads_nothing_outside(tmp_path: Path, behind: str) -> None:
    outside, root = tmp_path / "outside", tmp_path / "root"
    outside.mkdir()
    place = {"there/l": "there/l.arriving"}.get(behind, "there/l" if "/" in behind else "there")
    to = str(outside / "stray" if behind == "there/l" else outside).encode()
    file = wire.pack([remote.FILE, behind if "/" in behind else "there/file", 0, True, 0o644])
    with pytest.raises((ValueError, OSError)):
        unpack(wire.pack([remote.LINK, place], to) + file, root)
    assert list(outside.iterdir()) == []


def test_a_folder_takes_the_place_of_a_link_and_no_mode_gives_rights(tmp_path: Path) -> None:
    frames = wire.pack([remote.LINK, "there/l"], b"/tmp") + wire.pack([remote.FOLDER, "there/l"])
    unpack(frames + wire.pack([remote.FILE, "there/l/x", 0, True, 0o6755], b"x"), tmp_path)
    found = tmp_path / "there" / "l" / "x"
    assert not found.parent.is_symlink() and stat.S_IMODE(found.stat().st_mode) == 0o755


def test_parts_of_a_log_go_where_they_belong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "PIECE_BYTES", 4)
    far, near = tmp_path / "far", tmp_path / "near"
    far.write_bytes(b"0123456789")
    near.write_bytes(b"earlier ")
    for frame in pack_log(far, 2, 9, 5):
        [((kind, slot_id, position), body)] = wire.unpack(bytearray(frame))
        assert (kind, slot_id) == (LOG, 5)
        write_log(near, 8 + position, body)
    assert near.read_bytes() == b"earlier \0\0" + b"2345678"


# ------------------------------------------------------------------ code


def test_roots_of_code_cover_every_target_once(tmp_path: Path) -> None:
    home, other = tmp_path / "home", tmp_path / "other"
    for path in (home / "sub" / "t.py", other / "u.py", home / "package" / "__init__.py"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    targets = [
        TargetSpec(name="t", location="sub/t.py", attribute="t", base_folder=str(home)),
        TargetSpec(name="u", location=str(other / "u.py"), attribute="u", base_folder=str(home)),
        TargetSpec(name="p", location="package", attribute="p", base_folder=str(home)),
        TargetSpec(name="json", location="json", attribute="loads", base_folder=str(home)),
    ]
    code = CodeToSend(targets, home)
    assert code.roots == (str(home), str(other))
    assert sorted(map(Path, code.digests)) == sorted(
        [home / "sub" / "t.py", other / "u.py", home / "package" / "__init__.py"]
    )
    sent = tmp_path / "code"
    assert moved_path(str(other / "u.py"), code.roots, sent) == str(sent / "1" / "u.py")
    assert moved_path(str(home), code.roots, sent) == str(sent / "0")
    assert moved_path("sub/t.py", code.roots, sent) == "sub/t.py"
    assert moved_path("/elsewhere/x.py", code.roots, sent) == "/elsewhere/x.py"


def test_nothing_is_sent_for_a_target_of_an_installed_package(tmp_path: Path) -> None:
    module = TargetSpec(name="m", location="json", attribute="loads", base_folder=str(tmp_path))
    command = TargetSpec(name="c", kind="command", argv=("python", "x.py"))
    assert not CodeToSend([module], tmp_path).is_needed
    assert CodeToSend([command], tmp_path).is_needed


# ------------------------------------------------------------------ what is sent home, and when


@pytest.fixture
def far(tmp_path: Path) -> FilesForDriver:
    """A pilot of slot 3 whose worker 8 has task 1 with token 2."""
    folder = RunFolder(tmp_path / "far")
    folder.create()
    for path in (folder.attempts, folder.checkpoints, folder.parts_of(0)):
        path.mkdir(parents=True)
    far = FilesForDriver(folder, 3)
    slot = SlotSpec(slot_id=3, label="ray/3", devices=())
    task = Task(1, bytes.fromhex(KEY), 1, b"{}", 0, 2)
    frames = remote.start_command(8, slot) + remote.pass_command(8, [task], together=False)
    for header, body in wire.unpack(bytearray(frames)):
        far.hand_over(header, body)
    return far


def finished(outcome: Outcome = Outcome.OK, *, log_end: int = 0, files: bool = False) -> Results:
    return Results(8, [Finished(1, 2, outcome, 0.0, 0.1, 0, log_end, None, files=files)])


def places(frames: object) -> list[str]:
    """The places of what was shipped, and ``log START END``."""
    found = []
    for frame in frames:  # type: ignore[attr-defined]
        [(header, body)] = wire.unpack(bytearray(frame))
        if header[0] == LOG:
            found.append(f"log {header[2]} {header[2] + len(body)}")
        elif is_shipped(header):
            found.append(header[1])
        else:
            found.append(header[0])
    return found


def test_files_and_log_come_before_the_result(far: FilesForDriver, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "far")
    folder.worker_log(3).write_text("said and saying more")
    folder.attempt(KEY, 2).mkdir()
    (folder.attempt(KEY, 2) / "model").write_text("m")
    assert places(far.before(finished(log_end=4, files=True))) == [
        "log 0 4", f"attempts/{KEY}.2", f"attempts/{KEY}.2/model",
    ]  # fmt: skip
    assert not folder.attempt(KEY, 2).exists()
    assert places(far.before(finished(log_end=9))) == ["log 4 9"]


def test_a_checkpoint_is_sent_when_it_is_new_and_only_then(
    far: FilesForDriver, tmp_path: Path
) -> None:
    path = RunFolder(tmp_path / "far").checkpoint(KEY)
    assert places(far.new_checkpoints()) == []
    for number in range(2):
        (path.parent / "new").write_text(f"state {number}")
        os.replace(path.parent / "new", path)
        assert places(far.new_checkpoints()) == [f"checkpoints/{KEY}.ckpt"]
        assert places(far.new_checkpoints()) == []
    assert places(far.before(finished())) == []
    assert not path.exists(), "a finished task has none"


def test_a_checkpoint_from_home_is_not_sent_back(far: FilesForDriver, tmp_path: Path) -> None:
    RunFolder(tmp_path / "far").checkpoint(KEY).write_text("state")
    far.arrived(f"checkpoints/{KEY}.ckpt")
    assert places(far.new_checkpoints()) == []


@pytest.mark.parametrize("how", ["dies", "fails"])
def test_the_last_checkpoint_comes_before_a_failure(
    far: FilesForDriver, tmp_path: Path, how: str
) -> None:
    RunFolder(tmp_path / "far").checkpoint(KEY).write_text("state")
    died = WorkerDied(8, 1, None, "gone")
    event = died if how == "dies" else finished(Outcome.EXCEPTION)
    assert places(far.before(event)) == [f"checkpoints/{KEY}.ckpt"]
    assert places(far.new_checkpoints()) == []


def test_a_checkpoint_that_is_too_large_is_told_once(
    far: FilesForDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_files, "CHECKPOINT_LIMIT_BYTES", 3)
    RunFolder(tmp_path / "far").checkpoint(KEY).write_text("state")
    [frame] = far.new_checkpoints()
    [event] = remote.EventReader().read(wire.unpack(bytearray(frame)))
    assert isinstance(event, Progress)
    assert (event.worker_id, event.task_id) == (8, 1)
    assert "too large" in event.text
    assert places(far.new_checkpoints()) == []


def test_a_chunk_of_a_map_comes_with_its_result(far: FilesForDriver, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "far")
    (folder.parts_of(0) / f"{KEY}.jsonl").write_text("{}\n")
    (folder.parts_of(0) / f"{'cd' * 16}.rows").write_text("{}\n")
    folder.map_columns.write_text("{}")
    assert places(far.before(finished())) == ["columns.json", f"parts/0000/{KEY}.jsonl"]
    assert [path.name for path in folder.parts_of(0).iterdir()] == [f"{'cd' * 16}.rows"]
    for place in ("columns.json", f"parts/0000/{KEY}.jsonl"):
        assert place.split("/")[0] in SENT_HOME


def test_a_task_that_was_handed_back_is_not_watched_any_more(
    far: FilesForDriver, tmp_path: Path
) -> None:
    RunFolder(tmp_path / "far").checkpoint(KEY).write_text("of an earlier attempt")
    assert places(far.before(Returned(8, [1]))) == []
    assert places(far.new_checkpoints()) == []


# ------------------------------------------------------------------ in the words of the driver


def test_what_is_said_of_far_files_is_said_of_ours() -> None:
    there = places_of_pilot("/tmp/muster-x", "run", 2)
    places = dict(zip(there, ["/home/me/runs/run", "/home/me", "/other"], strict=True))
    view = DriverView(log_base=100, places=places)
    text = 'File "/tmp/muster-x/code/0/t.py" /tmp/muster-x/code/1/u.py /tmp/muster-x/runs/run/logs'
    ours = 'File "/home/me/t.py" /other/u.py /home/me/runs/run/logs'

    good = Finished(1, 1, Outcome.OK, 0.0, 0.0, 3, 7, None, value=text.encode())
    bad = Finished(1, 1, Outcome.EXCEPTION, 0.0, 0.0, 7, 9, None, message=text, trace=text)
    results = view.of(Results(8, [good, bad]))
    assert isinstance(results, Results)
    assert list(results.finished) == [
        good._replace(log_start=103, log_end=107),
        bad._replace(log_start=107, log_end=109, message=ours, trace=ours),
    ]
    death = WorkerDied(8, 1, None, "gone", trace=text, log_start=1, log_end=2)
    assert view.of(death) == death._replace(trace=ours, log_start=101, log_end=102)
    assert view.of(TargetBroken(8, text, text)) == TargetBroken(8, ours, ours)
    assert view.of(Returned(8, [1])) == Returned(8, [1])
