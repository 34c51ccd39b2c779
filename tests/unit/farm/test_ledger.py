"""The ledger's guarantees, with real processes killed in mid-write and real full disks."""

from __future__ import annotations

import hashlib
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from muster.base.errors import LedgerError
from muster.farm.ledger.read import LedgerReader
from muster.farm.ledger.store import Ledger
from muster.farm.task import AttemptRecord, Finished, NewTask, Outcome, SlotSpec, Task, TaskState

SLOT = SlotSpec(slot_id=0, label="cpu:0", devices=())


def new_tasks(count: int, first: int = 0) -> list[NewTask]:
    return [
        NewTask(hashlib.blake2b(b"%d" % i, digest_size=16).digest(), 1, b'{"x":%d}' % i)
        for i in range(first, first + count)
    ]


def record(task: Task, outcome: Outcome = Outcome.OK, **changes: object) -> AttemptRecord:
    finished = Finished(task.task_id, task.token, outcome, 1.0, 0.5, 0, 10, 3.5, b'{"y":1}')
    if outcome is not Outcome.OK:
        finished = finished._replace(value=b"{}", message="no 1", trace="  frame\nError")
    return AttemptRecord(task.task_id, task.token, 1, finished._replace(**changes))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


@pytest.fixture
def ledger(path: Path) -> Iterator[Ledger]:
    ledger = Ledger(path)
    ledger.begin()
    assert ledger.target_id("f.py:f") == 1
    ledger.worker_started(1, SLOT, "host", "worker-0.log")
    ledger.commit()
    yield ledger
    ledger.close()


def fill(ledger: Ledger, count: int) -> list[Task]:
    """``count`` claimed tasks."""
    ledger.begin()
    ledger.add_tasks(new_tasks(count))
    tasks = ledger.claim(count)
    ledger.commit()
    return tasks


def accept(ledger: Ledger, records: list[AttemptRecord]) -> None:
    ledger.begin()
    ledger.record_done(records, [(r.finished.value, None) for r in records])
    ledger.commit()


# ------------------------------------------------------------------ tasks, claims, the fence


def test_a_plan_inserted_again_changes_nothing(ledger: Ledger) -> None:
    ledger.begin()
    assert ledger.add_tasks(new_tasks(10)) == 10
    assert ledger.add_tasks(new_tasks(15)) == 5
    assert ledger.add_tasks(new_tasks(15)) == 0
    ledger.commit()
    assert ledger.counts()[TaskState.READY] == 15


def test_claims_take_the_most_urgent_first_each_with_a_new_token(ledger: Ledger) -> None:
    ledger.begin()
    tasks = new_tasks(6)
    tasks[4] = tasks[4]._replace(priority=5)
    tasks[2] = tasks[2]._replace(priority=5, group=9)
    ledger.add_tasks(tasks)
    claimed = ledger.claim(3)
    assert [t.payload for t in claimed] == [b'{"x":4}', b'{"x":2}', b'{"x":0}']
    assert [t.token for t in claimed] == [1, 1, 1]
    assert len(ledger.claim(100)) == 3
    assert ledger.claim(100) == []
    ledger.release(claimed)
    assert [t.token for t in ledger.claim(100)] == [2, 2, 2]
    ledger.commit()


def test_a_result_for_an_old_token_is_refused_and_nothing_of_it_is_kept(ledger: Ledger) -> None:
    first, second = fill(ledger, 2)
    ledger.begin()
    ledger.retoken([first._replace(token=2)])
    ledger.commit()
    with pytest.raises(LedgerError):
        accept(ledger, [record(second), record(first)])
    ledger.roll_back()
    assert ledger.counts()[TaskState.DONE] == 0
    accept(ledger, [record(second), record(first._replace(token=2))])
    with pytest.raises(LedgerError):  # none twice
        accept(ledger, [record(second)])
    ledger.roll_back()
    assert ledger.counts()[TaskState.DONE] == 2


def test_late_results_are_kept_aside(ledger: Ledger, path: Path) -> None:
    [task] = fill(ledger, 1)
    accept(ledger, [record(task)])
    ledger.begin()
    ledger.record_late(7, record(task._replace(token=0)).finished)
    ledger.commit()
    with LedgerReader(path) as reader:
        assert [row.value for row in reader.tasks()] == [b'{"y":1}']


def test_recover_voids_claims_and_keeps_what_has_ended(ledger: Ledger) -> None:
    tasks = fill(ledger, 5)
    accept(ledger, [record(tasks[0])])
    ledger.begin()
    ledger.record_failed([record(tasks[1], Outcome.CRASH)])
    assert ledger.recover() == 3
    assert [t.task_id for t in ledger.claim(10)] == [t.task_id for t in tasks[2:]]
    ledger.commit()


def test_retry_reopens_failed_ones_with_a_clean_slate(ledger: Ledger, path: Path) -> None:
    tasks = fill(ledger, 4)
    accept(ledger, [record(tasks[0])])
    ledger.begin()
    ledger.record_failed([record(t, Outcome.EXCEPTION) for t in tasks[1:3]])
    assert ledger.cancel_open() == 1
    assert ledger.reopen([TaskState.FAILED, TaskState.DONE, TaskState.READY]) == 2
    again = ledger.claim(10)
    assert [(t.task_id, t.token, t.tries) for t in again] == [
        (tasks[1].task_id, 2, 0),
        (tasks[2].task_id, 2, 0),
    ]
    ledger.record_done([record(t) for t in again], [(b"{}", None)] * 2)
    assert ledger.reopen([TaskState.CANCELLED]) == 1
    ledger.commit()
    with LedgerReader(path) as reader:
        assert [row.attempts for row in reader.tasks()] == [1, 2, 2, 0]
        assert reader.num_retried() == 2


def test_tries_survive_the_coordinator(ledger: Ledger, path: Path) -> None:
    [task] = fill(ledger, 1)
    ledger.begin()
    ledger.record_tried([(record(task, Outcome.CRASH), task._replace(token=2, tries=1))])
    ledger.commit()
    ledger.close()
    again = Ledger(path)
    again.begin()
    again.recover()
    assert again.claim(1)[0].tries == 1
    again.commit()
    again.close()


def test_failures_are_grouped_by_cause(ledger: Ledger, path: Path) -> None:
    tasks = fill(ledger, 6)
    ledger.begin()
    ledger.record_failed([record(t, Outcome.EXCEPTION, message=f"loss {n}.5 at 0x{n}f")
                          for n, t in enumerate(tasks[:4])])  # fmt: skip
    ledger.record_failed([record(tasks[4], Outcome.CRASH, message="SIGSEGV")])
    again = tasks[5]._replace(token=2, tries=1)
    ledger.record_tried([(record(tasks[5], Outcome.CRASH, message="SIGSEGV"), again)])
    ledger.commit()
    with LedgerReader(path) as reader:
        groups = reader.failures()
        assert [(g.outcome, g.num_failed, g.num_attempts) for g in groups] == [
            ("exception", 4, 4),
            ("crash", 1, 2),
        ]
        assert len(groups[0].tasks) == 4
        assert reader.trace_of(tasks[4].task_id) == "  frame\nError"
        assert reader.counts()[TaskState.CLAIMED] == 1
        assert len(reader.log_parts(tasks[5].task_id)) == 1


def test_a_cause_names_the_tasks_that_stay_failed(ledger: Ledger, path: Path) -> None:
    tasks = fill(ledger, 7)
    again = [task._replace(token=2, tries=1) for task in tasks[:6]]
    ledger.begin()
    ledger.record_tried([(record(task, Outcome.CRASH), more)
                         for task, more in zip(tasks, again, strict=False)])  # fmt: skip
    ledger.commit()
    with LedgerReader(path) as reader:  # none has failed yet: those whose attempts they were
        assert len(reader.failures()[0].named) == 5
    accept(ledger, [record(task) for task in again])
    ledger.begin()
    ledger.record_failed([record(tasks[6], Outcome.CRASH)])
    ledger.commit()
    with LedgerReader(path) as reader:
        (group,) = reader.failures()
        assert (group.num_failed, group.num_tasks, group.num_attempts) == (1, 7, 7)
        assert [name.split()[0] for name in group.named] == [str(tasks[6].task_id)]
        assert len(group.tasks) == 1


def test_names_that_are_no_keys_are_unknown(ledger: Ledger) -> None:
    for name in ("", "notes", "xyz", "ab" * 16):
        assert ledger.accepted(name) == ("unknown", None)


# ------------------------------------------------------------------ the process dies

WRITER = """
import sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from test_ledger import fill, new_tasks, record
from muster.farm.ledger.store import Ledger

ledger = Ledger(Path(sys.argv[1]))
ledger.begin()
ledger.target_id("f.py:f")
ledger.add_tasks(new_tasks(100_000))
ledger.commit()
while True:
    ledger.begin()
    tasks = ledger.claim(20)
    ledger.commit()
    ledger.begin()
    ledger.record_done([record(t) for t in tasks], [(b"{{}}", None)] * len(tasks))
    ledger.commit()
    print(tasks[-1].task_id, flush=True)
"""


@pytest.mark.parametrize("moment_s", [0.02, 0.11, 0.23])
def test_a_killed_writer_loses_nothing_acknowledged_and_leaves_nothing_half(
    path: Path, moment_s: float
) -> None:
    script = WRITER.format(tests=str(Path(__file__).parent))
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    acknowledged = int(process.stdout.readline())
    time.sleep(moment_s)
    process.send_signal(signal.SIGKILL)
    for line in process.stdout:
        if line.endswith("\n"):
            acknowledged = int(line)
    process.wait()
    process.stdout.close()
    ledger = Ledger(path)
    counts = ledger.counts()
    done = counts[TaskState.DONE]
    assert done % 20 == 0, "groups are whole"
    assert acknowledged <= done <= acknowledged + 20
    assert counts[TaskState.CLAIMED] in (0, 20)
    with LedgerReader(path) as reader:
        with_value = sum(row.value is not None for row in reader.tasks())
    assert with_value == done
    ledger.begin()
    ledger.recover()
    assert ledger.claim(1)[0].task_id == done + 1
    ledger.commit()
    ledger.close()


def test_what_was_not_committed_is_not_there(path: Path) -> None:
    first = Ledger(path)
    first.begin()
    first.target_id("f.py:f")
    first.add_tasks(new_tasks(5))
    first.roll_back()
    assert first.counts()[TaskState.READY] == 0
    first.close()


# ------------------------------------------------------------------ what is not a usable ledger


def test_a_newer_ledger_is_refused_untouched(path: Path) -> None:
    Ledger(path).close()
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA user_version = 99")
    database.close()
    for open_it in (Ledger, LedgerReader):
        with pytest.raises(LedgerError, match=r"newer muster \(format 99"):
            open_it(path)
    check = sqlite3.connect(path)
    assert check.execute("PRAGMA user_version").fetchone() == (99,)
    check.close()


@pytest.mark.parametrize("content", [b"", b"hello", b"SQLite format 3\x00" + b"\xff" * 4000])
def test_a_file_that_is_no_ledger_is_refused_untouched(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    for open_it in (Ledger, LedgerReader):
        with pytest.raises(LedgerError):
            open_it(path)
        assert path.read_bytes() == content


def test_another_programs_database_is_refused(path: Path) -> None:
    other = sqlite3.connect(path)
    other.execute("CREATE TABLE theirs (x)")
    other.commit()
    other.close()
    before = path.read_bytes()
    with pytest.raises(LedgerError, match="not a muster ledger"):
        Ledger(path)
    assert path.read_bytes() == before


def test_damage_in_the_middle_is_told_as_damage(path: Path) -> None:
    ledger = Ledger(path)
    ledger.begin()
    ledger.target_id("f.py:f")
    ledger.add_tasks(new_tasks(5000))
    ledger.commit()
    ledger.close()
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(8192 * 4)
        file.write(os.urandom(size - 8192 * 4))
    with pytest.raises(LedgerError, match="damaged") as caught:
        again = Ledger(path)
        try:
            again.begin()
            again.add_tasks(new_tasks(9000))
            again.claim(9000)
            again.commit()
        finally:
            again.close()
    assert "recover" in str(caught.value)


def test_a_folder_in_its_place_and_a_missing_one(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(LedgerError, match="unable to open"):
        Ledger(tmp_path / "folder")
    with pytest.raises(LedgerError, match="no ledger at"):
        LedgerReader(tmp_path / "absent.sqlite")


def test_a_leftover_of_a_death_during_creation_is_no_harm(path: Path) -> None:
    path.with_name(f".{path.name}.new").write_bytes(b"half")
    ledger = Ledger(path)
    assert ledger.counts()[TaskState.READY] == 0
    ledger.close()


# ------------------------------------------------------------------ small and read-only disks


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("may not mount a small disk here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_is_told_and_what_was_acknowledged_is_kept(small_disk: Path) -> None:
    path = small_disk / "ledger.sqlite"
    ledger = Ledger(path)
    ledger.begin()
    ledger.target_id("f.py:f")
    ledger.commit()
    acknowledged = 0
    with pytest.raises(LedgerError, match="full") as caught:
        while True:
            ledger.begin()
            ledger.add_tasks(new_tasks(200, acknowledged))
            ledger.commit()
            acknowledged += 200
    assert "Free space" in str(caught.value)
    ledger.roll_back()
    ledger.close()
    assert acknowledged > 0
    with LedgerReader(path) as reader:
        assert reader.counts()[TaskState.READY] == acknowledged


def test_a_ledger_that_may_not_grow_says_so(tmp_path: Path) -> None:
    """SQLite has a word for a full disk alone: of a quota or a limit it said "disk I/O error"."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.begin()
    ledger.target_id("f.py:f")
    ledger.commit()
    what = f"A file in {tmp_path} may not grow any more"
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, hard))
    try:
        with pytest.raises(LedgerError, match=what) as told:
            for first in range(0, 100_000, 1000):
                ledger.begin()
                ledger.add_tasks(new_tasks(1000, first))
                ledger.commit()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "ulimit -f" in str(told.value)
    ledger.roll_back()
    ledger.close()


def test_with_room_again_a_full_ledger_goes_on(small_disk: Path) -> None:
    path = small_disk / "ledger.sqlite"
    ledger = Ledger(path)
    ledger.begin()
    ledger.target_id("f.py:f")
    ledger.add_tasks(new_tasks(100))
    ledger.commit()
    filler = small_disk / "filler"
    with pytest.raises(OSError, match="space"):
        filler.write_bytes(b"x" * (2 << 20))
    with pytest.raises(LedgerError, match="full"):
        for first in range(100, 100_000, 1000):
            ledger.begin()
            ledger.add_tasks(new_tasks(1000, first))
            ledger.commit()
    ledger.roll_back()
    filler.unlink()
    ledger.begin()
    assert ledger.add_tasks(new_tasks(200)) == 100
    ledger.commit()
    ledger.close()


def test_a_read_only_disk_can_be_looked_at_but_not_written(small_disk: Path) -> None:
    path = small_disk / "ledger.sqlite"
    ledger = Ledger(path)
    ledger.begin()
    ledger.target_id("f.py:f")
    ledger.add_tasks(new_tasks(10))
    ledger.commit()
    ledger.close()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with LedgerReader(path) as reader:
        assert reader.counts()[TaskState.READY] == 10
    with pytest.raises(LedgerError, match="run-dir"):
        writer = Ledger(path)
        try:
            writer.begin()
        finally:
            writer.close()
    with pytest.raises(LedgerError, match=r"(?i)read-only|unable to open"):
        Ledger(small_disk / "new.sqlite")


# ------------------------------------------------------------------ reader and writer


def test_a_reader_never_keeps_the_writer_waiting(ledger: Ledger, path: Path) -> None:
    tasks = fill(ledger, 3000)
    accept(ledger, [record(t) for t in tasks[:1000]])
    with LedgerReader(path) as reader:
        rows = reader.tasks()
        next(rows)  # a snapshot is open now
        accept(ledger, [record(t) for t in tasks[1000:2000]])  # or "database is locked"
        rest = list(rows)
        assert len(rest) == 2999
        assert sum(row.state is TaskState.DONE for row in rest) == 999, "one consistent moment"
        assert reader.counts()[TaskState.DONE] == 2000


def test_a_reader_works_while_the_writer_is_in_a_transaction(ledger: Ledger, path: Path) -> None:
    tasks = fill(ledger, 10)
    ledger.begin()
    ledger.record_done([record(tasks[0])], [(b"{}", None)])
    with LedgerReader(path) as reader:
        assert reader.counts()[TaskState.DONE] == 0
        ledger.commit()
        assert reader.counts()[TaskState.DONE] == 1


def test_readers_in_a_thread_see_whole_groups_only(ledger: Ledger, path: Path) -> None:
    tasks = fill(ledger, 2000)
    seen: list[int] = []
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            with LedgerReader(path) as reader:
                seen.append(reader.counts()[TaskState.DONE])

    thread = threading.Thread(target=look)
    thread.start()
    for start in range(0, 2000, 50):
        accept(ledger, [record(t) for t in tasks[start : start + 50]])
    stop.set()
    thread.join()
    assert all(count % 50 == 0 for count in seen)
    assert seen == sorted(seen)


def test_commits_are_synced(path: Path) -> None:
    ledger = Ledger(path)
    assert ledger._db.execute("PRAGMA synchronous").fetchone() == (2,)
    assert ledger._db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    ledger.close()


@pytest.mark.parametrize("free_kib", range(4, 200, 12))
def test_a_ledger_made_on_a_nearly_full_disk_is_whole_or_not_there(
    small_disk: Path, free_kib: int
) -> None:
    """The disk holds 1 MiB; all but ``free_kib`` is taken."""
    (small_disk / "ballast").write_bytes(bytes(1024 * (1024 - free_kib)))
    try:
        Ledger(small_disk / "l.sqlite").close()
    except LedgerError:
        pass
    (small_disk / "ballast").unlink()
    ledger = Ledger(small_disk / "l.sqlite")
    assert ledger.meta("enqueued") is None
    ledger.close()


def test_the_number_of_a_task_that_is_not_there_is_no_start_of_a_key(tmp_path: Path) -> None:
    """`muster cancel RUN --task 25` ended a task of 18 whose key began with 25."""
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.begin()
    ledger.add_tasks([NewTask(b"\x25" * 16, ledger.target_id("a.py:f"), b"{}")])
    ledger.commit()
    ledger.close()
    with LedgerReader(tmp_path / "ledger.sqlite") as reader:
        assert [reader.find(text) for text in ("25", "2525252", "0")] == [[], [], []]
        assert reader.find("1") == reader.find("252525252525") == [(1, b"\x25" * 16)]
