"""Files that are either old or new, with the mode that this user's files have."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from muster.base.atomic_files import (
    replacing,
    sweep_idle,
    sync_tree,
    write_atomic,
    write_pieces,
)


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_a_new_file_has_the_mode_of_the_mask(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        write_atomic(tmp_path / "a", b"x")
        write_atomic(tmp_path / "a", b"y")
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o666 & ~mask
    assert os.listdir(tmp_path) == ["a"]


def test_files_of_other_threads_keep_their_mask(tmp_path: Path) -> None:
    ended = threading.Event()

    def write() -> None:
        while not ended.is_set():
            write_atomic(tmp_path / "status", b"x")

    before = os.umask(0o077)
    writer = threading.Thread(target=write)
    writer.start()
    try:
        modes = set()
        for number in range(2000):
            path = tmp_path / str(number)
            path.touch()
            modes.add(path.stat().st_mode & 0o777)
    finally:
        ended.set()
        writer.join()
        os.umask(before)
    assert modes == {0o600}


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_atomic(path, b"old")
    with pytest.raises(KeyError), replacing(path) as beside:
        beside.write_bytes(b"new")
        raise KeyError
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a"]


def test_a_tree_of_all_kinds_is_synced(tmp_path: Path) -> None:
    (tmp_path / "b" / "c").mkdir(parents=True)
    (tmp_path / "b" / "c" / "file").write_text("x")
    (tmp_path / "b" / "dangling").symlink_to("nowhere")
    os.mkfifo(tmp_path / "b" / "pipe")  # opening it would wait for a reader
    sync_tree(tmp_path)


@pytest.mark.parametrize("taken", [0, 1, 3, 4, 7, 2500, None])
def test_pieces_follow_each_other_also_where_the_system_takes_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: int | None
) -> None:
    pieces = [b"abc", b"", b"defg", *(b"%d" % number for number in range(2500))]
    if taken is not None:
        monkeypatch.setattr(os, "writev", lambda to, some: os.write(to, b"".join(some)[:taken]))
    handle = os.open(tmp_path / "a", os.O_WRONLY | os.O_CREAT)
    write_pieces(handle, pieces)
    os.close(handle)
    assert (tmp_path / "a").read_bytes() == b"".join(pieces)


def test_what_killed_writers_left_goes_and_what_may_be_written_stays(tmp_path: Path) -> None:
    kept = {
        ".run.json.0123abcd.tmp": 10.0,  # perhaps of a writer that lives
        ".run.json.0123abcd": 1e5,
        "run.json.0123abcd.tmp": 1e5,
        ".run.json.0123abcx.tmp": 1e5,
        ".results.csv.0123abcd.folder": 1e5,
    }
    gone = {".run.json.89ef0123.tmp": 1e5, ".latest.json.0123abcd.tmp": 1e5}
    now_s = 1_790_000_000.0
    for name, age_s in (kept | gone).items():
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (now_s, now_s - age_s))
    (tmp_path / ".folder.0123abcd.tmp").mkdir()
    os.utime(tmp_path / ".folder.0123abcd.tmp", (now_s, now_s - 1e5))
    sweep_idle(tmp_path, now_s)
    assert set(os.listdir(tmp_path)) == {*kept, ".folder.0123abcd.tmp"}
    sweep_idle(tmp_path / "nowhere", now_s)
