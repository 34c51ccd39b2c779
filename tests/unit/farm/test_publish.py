"""Files of attempts: published by rename when accepted, never before, never lost, never mixed."""

from __future__ import annotations

import hashlib
import os
import sys
import tracemalloc
from pathlib import Path

import pytest
from tests.unit.farm.test_metric_stream import Sent

from muster.base.atomic_files import write_atomic
from muster.farm.ledger.store import Ledger
from muster.farm.results import (
    INLINE_BYTES,
    hand_on,
    publish,
    publish_after_crash,
    store_value,
    with_logged,
)
from muster.farm.task import AttemptRecord, Finished, NewTask, Order, Outcome, TargetSpec
from muster.farm.worker.perform import Performer
from muster.run.folder import RunFolder

KEY, HEIR = "ab" * 16, "cd" * 16


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    return folder


def attempt(folder: RunFolder, key: str, token: int, text: str) -> Path:
    path = folder.attempt(key, token)
    path.mkdir(parents=True)
    (path / "out.txt").write_text(text)
    return path


def test_publishing_moves_the_whole_folder_and_twice_is_no_harm(folder: RunFolder) -> None:
    source = attempt(folder, KEY, 2, "two")
    publish(folder, KEY, 2)
    assert not source.exists()
    for _ in range(2):
        assert (folder.artifact(KEY) / "out.txt").read_text() == "two"
        publish(folder, KEY, 2)


def test_a_half_published_folder_is_replaced(folder: RunFolder) -> None:
    attempt(folder, KEY, 2, "whole")
    folder.artifact(KEY).mkdir(parents=True)
    (folder.artifact(KEY) / "stale.txt").write_text("old")
    publish(folder, KEY, 2)
    assert [path.name for path in folder.artifact(KEY).iterdir()] == ["out.txt"]


def test_the_checkpoint_goes_with_the_result_also_without_files(folder: RunFolder) -> None:
    folder.checkpoints.mkdir()
    folder.checkpoint(KEY).write_bytes(b"J{}")
    publish(folder, KEY, 1)
    assert not folder.checkpoint(KEY).exists()
    assert not folder.artifact(KEY).exists()


def test_what_a_program_saved_is_published_with_its_files(folder: RunFolder) -> None:
    """In their rename, so that a crash before it leaves both for the next start; beside a folder of
    the same name that the program has made."""
    source = attempt(folder, KEY, 1, "one")
    for place in (source / "checkpoint", folder.saved(KEY)):
        place.mkdir(parents=True)
        (place / "it.pt").write_text(place.name)
    for _ in range(2):
        publish(folder, KEY, 1)
        assert (folder.artifact(KEY) / "checkpoint" / "it.pt").read_text() == "checkpoint"
        assert (folder.artifact(KEY) / "checkpoint-2" / "it.pt").exists()
        assert not folder.saved(KEY).exists()


@pytest.mark.parametrize("points", [b"", b"its points"])
def test_a_checkpoint_of_any_size_is_handed_on_in_little_memory(
    points: bytes, folder: RunFolder
) -> None:
    folder.checkpoints.mkdir()
    path, handed = folder.checkpoint(KEY), folder.checkpoint(HEIR)
    path.write_bytes(with_logged(points, b"J{}"))
    before = path.stat().st_size - len(b"J{}")
    os.truncate(path, 16 << 20)
    tracemalloc.start()
    try:
        for _ in range(2):  # once by a coordinator that died
            assert hand_on(folder, KEY, HEIR)
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()
    write_atomic(path, b"its parent has gone on")
    assert handed.stat().st_size == (16 << 20) - before
    assert handed.read_bytes()[:4] == b"J{}\0"
    assert sorted(folder.checkpoints.iterdir()) == [path, handed], "and nothing else is left"


def test_links_in_what_a_program_saved_lead_into_the_copy(folder: RunFolder) -> None:
    saved, handed = folder.saved(KEY), folder.saved(HEIR)
    (saved / "step-3").mkdir(parents=True)
    links = {"latest": saved / "step-3", "same": "step-3", "data": "/nowhere/data"}
    for name, end in links.items():
        (saved / name).symlink_to(end)
    assert hand_on(folder, KEY, HEIR)
    ends = [str((handed / name).readlink()) for name in links]
    assert ends == [str(handed / "step-3"), "step-3", "/nowhere/data"]


@pytest.mark.skipif(sys.platform == "win32", reason="it has no /bin/sh")
@pytest.mark.parametrize(("end", "is_kept"), [("", True), ("; exit 1", False)])
def test_a_program_that_saves_only_has_a_folder_where_it_is_done(
    end: str, is_kept: bool, tmp_path: Path, folder: RunFolder
) -> None:
    line = f'echo x > "$MUSTER_CHECKPOINT_DIR/it.pt"{end}'
    spec = TargetSpec(name="f", kind="command", argv=(line,), shell=True)
    log = tmp_path / "log"
    log.touch()
    performer = Performer({1: spec}, folder, "cpu", log=log, line=Sent())
    finished = performer.run(Order(1, 1, 1, KEY, 1, b"{}"))
    assert (finished.outcome is Outcome.OK) == is_kept
    assert finished.files == folder.attempt(KEY, 1).exists() == is_kept
    assert (folder.saved(KEY) / "it.pt").exists()
    if is_kept:  # the coordinator died between its commit and the rename
        assert publish_after_crash(folder, lambda key: ("done", 1)) == 1
        assert (folder.artifact(KEY) / "checkpoint" / "it.pt").exists()


def test_after_a_crash_accepted_folders_are_published_and_torn_ones_removed(
    folder: RunFolder,
) -> None:
    ledger = Ledger(folder.ledger)
    names = ["done", "failed", "open", "held"]
    keys = {name: hashlib.blake2b(name.encode(), digest_size=16).digest() for name in names}
    ledger.begin()
    ledger.target_id("f")
    ledger.add_tasks([NewTask(keys[name], 1, b"{}") for name in names])
    tasks = dict(zip(names, ledger.claim(4), strict=True))
    base = Finished(0, 0, Outcome.OK, 0.0, 0.0, 0, 0, None)

    def record(name: str, outcome: Outcome) -> AttemptRecord:
        task = tasks[name]
        own = base._replace(task_id=task.task_id, token=task.token, outcome=outcome, files=True)
        return AttemptRecord(task.task_id, task.token, 1, own)

    ledger.retoken([tasks["done"]._replace(token=3)])
    tasks["done"] = tasks["done"]._replace(token=3)
    ledger.record_done([record("done", Outcome.OK)], [(b"{}", None)])
    ledger.record_failed([record("failed", Outcome.EXCEPTION)])
    ledger.recover(kept={(tasks["held"].task_id, tasks["held"].token)})
    ledger.commit()
    hexes = {name: key.hex() for name, key in keys.items()}
    for token in (1, 2, 3):
        attempt(folder, hexes["done"], token, f"attempt {token}")
    kept = attempt(folder, hexes["failed"], 1, "to be looked at")
    torn = attempt(folder, hexes["open"], 1, "cut short")
    at_work = attempt(folder, hexes["held"], 1, "of a worker that goes on")
    stray = folder.attempts / "notes.txt"
    stray.write_text("the user's own")
    (folder.attempts / "some.folder").mkdir()
    assert publish_after_crash(folder, ledger.accepted) == 1
    assert (folder.artifact(hexes["done"]) / "out.txt").read_text() == "attempt 3"
    assert kept.exists()
    assert not torn.exists()
    assert at_work.exists()
    assert stray.exists()
    left = {path.name for path in folder.attempts.iterdir()}
    assert left == {kept.name, at_work.name, "notes.txt", "some.folder"}
    assert publish_after_crash(folder, ledger.accepted) == 0
    ledger.close()


def test_without_attempts_there_is_nothing_to_do(folder: RunFolder) -> None:
    assert publish_after_crash(folder, lambda key: ("unknown", None)) == 0


def test_large_values_go_into_a_file_with_their_hash(folder: RunFolder) -> None:
    small, large = b"s" * INLINE_BYTES, b"l" * (INLINE_BYTES + 1)
    assert store_value(folder, KEY, small) == (small, None)
    value, digest = store_value(folder, KEY, large)
    assert value is None
    assert folder.value(KEY).read_bytes() == large
    assert digest == hashlib.sha256(large).hexdigest()
