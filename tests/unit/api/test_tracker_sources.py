"""What trackers are told of a run: every number of it, and none of its secrets."""

from __future__ import annotations

import io
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.tracked import add_lines, gang_folder

from muster.api.trackers import sources
from muster.api.trackers.feed import Source
from muster.api.trackers.guard import TrackerThread
from muster.api.trackers.sources import source_of
from muster.base.metric_log import PROCESS, mark_start
from muster.farm.canonical import payload_and_key
from muster.farm.ledger.store import Ledger
from muster.farm.metrics import encode
from muster.farm.task import NewTask
from muster.run.folder import RunFolder
from muster.run.record import RunRecord, write_run

SECRET = "xyzzy-1234"


def folder_of(path: Path, kind: Any, spec: dict[str, Any]) -> RunFolder:
    folder = RunFolder(path)
    folder.create()
    record = RunRecord(
        run_id="r", name=path.name, kind=kind, created_s=0.0, code={}, options={}, argv=(),
        spec=spec, cwd="/", environment={},
    )  # fmt: skip
    write_run(folder, record)
    return folder


def sweep(path: Path, params: dict[str, Any]) -> RunFolder:
    """A sweep of one task, with the number 1."""
    folder = folder_of(path, "sweep", {})
    ledger = Ledger(folder.ledger)
    ledger.begin()
    payload, key = payload_and_key("t.py:f")(params)
    ledger.add_tasks([NewTask(key, ledger.target_id("t.py:f"), payload)])
    ledger.commit()
    ledger.close()
    return folder


def all_of(source: Source) -> list[tuple[str, int, float]]:
    found: list[tuple[str, int, float]] = []
    mark: Any = None
    while True:
        after, batches = source.read(mark)
        if after == mark:
            return found
        found += [(point.name, point.step, point.value) for point in batches.get(0, ())]
        mark = after


def test_no_secret_is_in_a_name_or_a_setting(tmp_path: Path) -> None:
    inner = [{"api_key": SECRET, "deep": ["--token", SECRET]}]
    place = f"http://me:{SECRET}@host/db?page=2&key={SECRET}"
    words = ["--lr", "0.1", "--api-key", SECRET, f"--password={SECRET}", f"--place={place}", place]
    folders = [
        sweep(tmp_path / "sweep", {"lr": 0.1, "api_key": SECRET, "more": {"inner": inner}}),
        sweep(tmp_path / "address", {"place": place, "lr": 0.1}),
        folder_of(tmp_path / "map", "map", {"stages": ["s"], "flags": inner}),
        folder_of(tmp_path / "run", "run", {"program": {"path": "t.py", "args": words}}),
        folder_of(tmp_path / "train", "train", {"train": {"settings": {"inner": inner}}}),
    ]
    for folder in folders:
        told = source_of(folder, "id").tracked(1)
        assert SECRET not in repr(told) and "…" in repr(told), folder.name
    assert "--lr" in repr(source_of(folders[3], "id").tracked(0).settings)
    assert (
        source_of(folders[1], "id").tracked(1).settings["place"] == "http://…@host/db?page=2&key=…"
    )
    assert SECRET.encode() in folders[1].ledger.read_bytes(), "what a task needs stays whole here"
    assert "lr=0.1" in source_of(folders[0], "id").tracked(1).name


def test_a_batch_that_ends_in_the_middle_of_lines_without_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "_POINTS_AT_ONCE", 2)
    folder = gang_folder(tmp_path / "run", [{"loss": float(number)} for number in range(7)])
    assert all_of(source_of(folder, "id")) == [("loss", step, float(step)) for step in range(7)]


@pytest.mark.parametrize("old", [{}, {PROCESS: "one"}])
def test_folds_of_a_program_and_a_second_start_of_it(old: dict[str, str], tmp_path: Path) -> None:
    """Another process of the tracker goes on behind the mark, whatever the steps are."""
    folds = [{"step": step, **old, "loss": 1.0} for _ in "ab" for step in range(3)]
    folder = gang_folder(tmp_path / "run", folds, "run")
    mark, batches = source_of(folder, "id").read(None)
    assert [point.step for point in batches[0]] == [0, 1, 2, 0, 1, 2]
    add_lines(folder, folds[:2])
    assert source_of(folder, "id").num_after(mark) == 2
    _, batches = source_of(folder, "id").read(json.loads(json.dumps(mark)))
    assert [(point.step, point.attempt) for point in batches[0]] == [(0, 1), (1, 1)]
    before = list(source_of(folder, "id").before(0, mark))
    assert [(point.name, point.step, point.attempt) for point in before] == [("loss", 2, 1)]
    mark_start(folder.metrics)
    add_lines(folder, [{"step": 1, "loss": 2.0}])
    _, batches = source_of(folder, "id").read(mark)
    assert [(p.step, p.value, p.attempt) for p in batches[0]][2:] == [(1, 2.0, 2)]


def test_what_an_older_muster_has_sent_of_a_program_is_not_sent_again(tmp_path: Path) -> None:
    folder = gang_folder(
        tmp_path / "run", [{"step": step, "loss": 1.0} for step in range(4)], "run"
    )
    _, batches = source_of(folder, "id").read({"loss": 2})
    assert [point.step for point in batches[0]] == [3]


def test_a_start_within_an_attempt_counts_as_an_attempt(tmp_path: Path) -> None:
    folder = sweep(tmp_path / "run", {"lr": 1})
    ledger = Ledger(folder.ledger)
    ledger.begin()
    frames = [(1, 0), (1, 1), (2, 0)]
    ledger.record_metrics([
        (1, token, start, encode([("loss", 5, 0.0, 1.0)], start)) for token, start in frames
    ])  # fmt: skip
    ledger.commit()
    ledger.close()
    points = source_of(folder, "id").read(None)[1][1]
    assert [point.name for point in points] == ["loss"] * 3
    attempts = [point.attempt for point in points]
    assert attempts == sorted(set(attempts)), "each later than the one before"


def test_numbers_that_no_tracker_takes_are_left_out(tmp_path: Path) -> None:
    lines = [
        {"step": 1, "big": 10**400, "good": 1.0, "_time": 10**400},
        {"step": 2**70, "good": 2.0},
        {"step": 3.0, "good": 3.0, "_time": 1e300},
        {"step": 3.5, "good": 4.0},
    ]
    folder = gang_folder(tmp_path / "run", lines)
    assert all_of(source_of(folder, "id")) == [("good", 1, 1.0), ("good", 3, 3.0)]
    settings = source_of(sweep(tmp_path / "sweep", {"n": 10**400}), "id").tracked(1).settings
    assert settings == {"n": hex(10**400)}


def test_a_batch_has_no_more_points_than_it_should(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "_POINTS_AT_ONCE", 4)
    folder = sweep(tmp_path / "run", {"lr": 1})
    ledger = Ledger(folder.ledger)
    ledger.begin()
    frames = [encode([("loss", 3 * number + i, 0.0, 1.0) for i in range(3)]) for number in range(4)]
    ledger.record_metrics([(1, 1, number, body) for number, body in enumerate(frames)])
    ledger.commit()
    ledger.close()
    source = source_of(folder, "id")
    with source.looking():
        mark, first = source.read(None)
        _, second = source.read(mark)
        steps = [point.step for found in (first, second) for point in found[1]]
        assert (len(first[1]), steps) == (6, list(range(12)))
        assert [point.step for point in source.before(1, mark)] == list(range(6))


def test_the_end_of_a_run_cuts_a_long_pause_short(tmp_path: Path) -> None:
    thread = TrackerThread(
        RunFolder(tmp_path), "id", "wandb", print, most_tries=None, longest_pause_s=1e6
    )
    timer = threading.Timer(0.1, thread.over.set)
    timer.start()
    assert thread._pause(1e6, ends_when_over=True)
    timer.join()


def test_a_secret_that_is_read_in_two_parts_is_in_no_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_API_KEY", SECRET)
    thread = TrackerThread(
        RunFolder(tmp_path), "id", "wandb", print, most_tries=1, longest_pause_s=1
    )
    log = io.StringIO()
    for part in (f"a\nrefused {SECRET[:4]}", f"{SECRET[4:]} by", " it"):
        thread._hear(part.encode(), log)
    assert log.getvalue() == "a\n"
    thread._hear(b"", log, is_over=True)
    assert log.getvalue() == "a\nrefused … by it"


def test_one_point_that_is_left_is_one(tmp_path: Path) -> None:
    folder = gang_folder(tmp_path / "run", [{"step": 1, "loss": 1.0}])
    thread = TrackerThread(folder, "id", "wandb", print, most_tries=1, longest_pause_s=1)
    assert "1 point is not sent yet. Nothing is lost" in thread.what_is_left()
