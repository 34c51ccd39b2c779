"""A large plan is listed without the index of its keys, whatever dies meanwhile."""

from __future__ import annotations

import hashlib
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path

import pytest

from muster.base.errors import LedgerError, SetupError
from muster.farm.decisions import Policy, Stopped
from muster.farm.ledger.read import LedgerReader
from muster.farm.ledger.store import Ledger
from muster.farm.plan import Listing, Plan
from muster.farm.task import AttemptRecord, Finished, NewTask, Outcome, SlotSpec, Task, TaskState
from muster.run.folder import RunFolder

TOTAL = 60_000
OLDER = 2  # the highest format of a ledger that older musters read


def a_task(number: int) -> NewTask:
    key = hashlib.blake2b(b"%d" % number, digest_size=16).digest()
    return NewTask(key, 1, b'{"x":%d}' % number)


def listing(folder: Path, ledger: Ledger, *, is_distinct: bool = True) -> Listing:
    plan = Plan(
        folder=RunFolder(folder), targets={}, slots=(), policy=Policy(), total=TOTAL,
        feed=map(a_task, range(TOTAL)), is_distinct=is_distinct, plan_id="many",
    )  # fmt: skip
    return Listing(plan, ledger)


def turn(ledger: Ledger, tasks: Listing) -> None:
    ledger.begin()
    tasks.add()
    ledger.commit()


def version(path: Path) -> int:
    with closing(sqlite3.connect(path)) as database:
        return int(database.execute("PRAGMA user_version").fetchone()[0])


def is_unique(path: Path) -> bool:
    """Whether SQLite itself refuses a second task of a key."""
    with closing(sqlite3.connect(path)) as database:
        rows = database.execute("PRAGMA index_list(tasks)").fetchall()
        return any(
            row[2] and database.execute(f"PRAGMA index_info({row[1]})").fetchall()[0][2] == "key"
            for row in rows
        )


def test_older_musters_refuse_it_until_all_tasks_are_listed(tmp_path: Path) -> None:
    ledger = Ledger(path := tmp_path / "ledger.sqlite")
    assert is_unique(path) and version(path) <= OLDER
    tasks = listing(tmp_path, ledger)
    turn(ledger, tasks)
    assert version(path) > OLDER, "an older muster would list its tasks a second time"
    while tasks.goes_on:
        turn(ledger, tasks)
    assert is_unique(path) and version(path) <= OLDER
    assert ledger.last_task() == TOTAL
    ledger.close()


def test_a_plan_whose_tasks_may_be_equal_keeps_the_index(tmp_path: Path) -> None:
    ledger = Ledger(path := tmp_path / "ledger.sqlite")
    turn(ledger, listing(tmp_path, ledger, is_distinct=False))
    assert is_unique(path) and version(path) <= OLDER
    ledger.close()


def test_a_plan_that_is_continued_keeps_the_index(tmp_path: Path) -> None:
    ledger = Ledger(path := tmp_path / "ledger.sqlite")
    ledger.begin()
    ledger.add_tasks([a_task(7)])
    ledger.commit()
    tasks = listing(tmp_path, ledger)
    while tasks.goes_on:
        turn(ledger, tasks)
    assert is_unique(path) and ledger.last_task() == TOTAL
    ledger.close()


def test_a_plan_whose_listing_was_stopped_goes_on_without_the_index(tmp_path: Path) -> None:
    ledger = Ledger(path := tmp_path / "ledger.sqlite")
    turn(ledger, listing(tmp_path, ledger))
    ledger.begin()
    ledger.index_keys()
    ledger.commit()
    assert is_unique(path) and 0 < (num_listed := ledger.last_task()) < TOTAL
    tasks = listing(tmp_path, ledger)
    turn(ledger, tasks)
    assert ledger.last_task() == num_listed, "they are there already"
    turn(ledger, tasks)
    assert version(path) > OLDER and not is_unique(path)
    while tasks.goes_on:
        turn(ledger, tasks)
    assert is_unique(path) and version(path) <= OLDER
    assert ledger.last_task() == len(set(ledger.keys_after(0, 2 * TOTAL))) == TOTAL
    ledger.close()


def test_a_ledger_that_holds_another_task_behind_the_beginning_keeps_the_index(
    tmp_path: Path,
) -> None:
    ledger = Ledger(path := tmp_path / "ledger.sqlite")
    turn(ledger, listing(tmp_path, ledger))
    ledger.begin()
    ledger.add_tasks([a_task(TOTAL - 1)])  # as one that somebody has added
    ledger.commit()
    tasks = listing(tmp_path, ledger)
    while tasks.goes_on:
        turn(ledger, tasks)
        assert is_unique(path) and version(path) <= OLDER
    assert ledger.last_task() == TOTAL
    ledger.close()


def test_a_ledger_with_stopped_tasks_keeps_the_index_and_its_format(tmp_path: Path) -> None:
    ledger = Ledger(path := tmp_path / "ledger.sqlite")
    ledger.begin()
    ledger.add_tasks([a_task(0)])
    ledger.record_stopped([Stopped(ledger.claim(1)[0], None)], [b"{}"])
    ledger.commit()
    assert version(path) == OLDER
    tasks = listing(tmp_path, ledger)
    while tasks.goes_on:
        turn(ledger, tasks)
        assert is_unique(path) and version(path) == OLDER
    assert ledger.last_task() == TOTAL
    ledger.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "sorting"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("may not mount a small disk here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


SORTED = """
import sys
from pathlib import Path
from tests.unit.farm.test_ledger_without_keys import a_task
from muster.base.errors import LedgerError
from muster.farm.ledger.store import Ledger
path = Path(sys.argv[1])
with_room = len(sys.argv) > 2
ledger = Ledger(path)
if not with_room:
    ledger.begin()
    ledger.forget_keys()
    ledger.list_tasks(map(a_task, range(120_000)))
    ledger.commit()
    ledger.begin()
    try:
        ledger.index_keys()
    except LedgerError as error:
        print(error)
        ledger.roll_back()
print(ledger.last_task())
ledger.close()
"""


def test_where_the_disk_for_sorting_is_full_it_is_the_one_that_is_named(
    tmp_path: Path, small_disk: Path
) -> None:
    path = tmp_path / "ledger.sqlite"

    def run(place: Path, *words: str) -> list[str]:
        search = os.pathsep.join(sys.path)
        done = subprocess.run(
            [sys.executable, "-c", SORTED, path, *words], capture_output=True, check=True,
            text=True, env={**os.environ, "PYTHONPATH": search, "SQLITE_TMPDIR": str(place)},
        )  # fmt: skip
        return done.stdout.splitlines()

    told = run(small_disk)
    assert str(small_disk) in told[0] and "full" in told[0]
    assert not any(line.startswith(f"The disk of {path}") for line in told)
    assert "SQLITE_TMPDIR" in "".join(told) and told[-1] == "120000"
    assert run(tmp_path, "again") == ["120000"]
    assert is_unique(path) and version(path) <= OLDER


def test_tasks_that_are_added_meanwhile_are_not_there_twice(tmp_path: Path) -> None:
    ledger = Ledger(path := tmp_path / "ledger.sqlite")
    tasks = listing(tmp_path, ledger)
    turn(ledger, tasks)
    num_listed = ledger.last_task()
    ledger.begin()
    assert ledger.add_tasks([a_task(3), a_task(TOTAL - 1)]) == 1
    ledger.commit()
    assert is_unique(path) and ledger.last_task() == num_listed + 1
    while tasks.goes_on:
        turn(ledger, tasks)
    assert ledger.last_task() == TOTAL
    ledger.close()


def test_what_goes_wrong_meanwhile_is_what_is_told(tmp_path: Path) -> None:
    with closing(Ledger(tmp_path / "ledger.sqlite")) as ledger:
        ledger.begin()
        ledger.forget_keys()
        ledger.list_tasks(map(a_task, range(200_000)))
        ledger.commit()

        def look() -> None:
            raise SetupError("another coordinator has gone on")

        ledger.begin()
        with pytest.raises(SetupError, match="another coordinator"):
            ledger.index_keys(look)
        (cache,) = ledger._db.execute("PRAGMA cache_size").fetchone()
        assert cache < -20_000, "it was small for sorting alone"
        ledger.roll_back()
        ledger.begin()
        ledger.index_keys()
        ledger.commit()
    assert is_unique(tmp_path / "ledger.sqlite")


def test_a_turn_that_is_taken_back_leaves_the_index(tmp_path: Path) -> None:
    ledger = Ledger(path := tmp_path / "ledger.sqlite")
    ledger.begin()
    listing(tmp_path, ledger).add()
    ledger.roll_back()
    assert is_unique(path) and version(path) <= OLDER
    ledger.begin()
    assert ledger.add_tasks([a_task(1), a_task(1)]) == 1
    ledger.commit()
    ledger.close()


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.unit.farm.test_ledger_without_keys import listing, turn
from muster.farm.ledger.store import Ledger
folder = Path(sys.argv[1])
ledger = Ledger(folder / "ledger.sqlite")
tasks = listing(folder, ledger)
for _ in range(3):
    turn(ledger, tasks)
if sys.argv[2] == "within":
    ledger.begin()
    tasks.add()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("when", ["between", "within"])
def test_the_next_start_of_a_killed_coordinator_lists_each_task_once(
    tmp_path: Path, when: str
) -> None:
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, tmp_path, when], check=False, cwd=Path.cwd(),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert killed.returncode == -signal.SIGKILL
    path = tmp_path / "ledger.sqlite"
    with LedgerReader(path) as reader:  # whoever looks at it needs no index
        assert 0 < (known := reader.num_tasks()) < TOTAL
        assert reader.counts()[TaskState.READY] == known
        assert reader.find(a_task(5).key.hex()) == [(6, a_task(5).key)]
    ledger = Ledger(path)
    assert is_unique(path) and version(path) <= OLDER
    tasks = listing(tmp_path, ledger)
    while tasks.goes_on:
        turn(ledger, tasks)
    assert ledger.last_task() == TOTAL
    ledger.close()


def _ended(task: Task, outcome: Outcome = Outcome.OK) -> AttemptRecord:
    finished = Finished(task.task_id, task.token, outcome, 1.0, 0.5, 0, 0, None, b'{"y":1}')
    return AttemptRecord(task.task_id, task.token, 1, finished)


@pytest.mark.parametrize("is_older", [False, True])
def test_counts_of_a_reader_are_those_of_all_tasks(tmp_path: Path, is_older: bool) -> None:
    ledger = Ledger(path := tmp_path / "ledger.sqlite")
    if is_older:  # its index was one of all tasks that are not done
        ledger._db.execute("DROP INDEX tasks_unlike")
        ledger._db.execute("CREATE INDEX tasks_not_done ON tasks (state) WHERE state <> 2")
    ledger.begin()
    ledger.worker_started(1, SlotSpec(slot_id=0, label="cpu:0", devices=()), "host", "log")
    ledger.add_tasks(map(a_task, range(40)))
    claimed = iter(ledger.claim(30))
    done = [_ended(task) for task in islice(claimed, 11)]
    ledger.record_done(done, [(b"{}", None)] * len(done))
    ledger.record_failed([_ended(task, Outcome.EXCEPTION) for task in islice(claimed, 5)])
    ledger.cancel_one(next(claimed).task_id, (TaskState.CLAIMED,))
    ledger.commit()
    expected = ledger.counts()
    assert sorted(expected.values()) == [0, 1, 5, 10, 11, 13]
    with LedgerReader(path) as reader:
        assert reader.counts() == expected
    ledger.close()


def test_runs_of_tasks_are_claimed_and_done_like_single_ones(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.begin()
    ledger.worker_started(1, SlotSpec(slot_id=0, label="cpu:0", devices=()), "host", "log")
    ledger.add_tasks(map(a_task, range(300)))
    first = ledger.claim(300)
    # Every seventh is handed out again, so that tokens differ within what follows itself.
    ledger.retoken([task._replace(token=5) for task in first[::7]])
    ledger.commit()
    tasks = [task._replace(token=5) if i % 7 == 0 else task for i, task in enumerate(first)]
    mixed = [*tasks[150:], *tasks[:150]]
    ledger.begin()
    stale = [_ended(task) for task in first[:20]]
    with pytest.raises(LedgerError, match="do not match the tokens"):
        ledger.record_done(stale, [(b"{}", None)] * len(stale))
    ledger.roll_back()
    ledger.begin()
    values = [(b'{"y":1}', None) if i % 3 else (None, "ab" * 32) for i in range(300)]
    ledger.record_done([_ended(task) for task in mixed], values)
    ledger.commit()
    assert ledger.counts()[TaskState.DONE] == ledger.num_results() == 300
    with LedgerReader(ledger.path) as reader:
        rows = {row.task_id: row for row in reader.tasks()}
        for task, (value, _) in zip(mixed, values, strict=True):
            assert (rows[task.task_id].value, rows[task.task_id].attempts) == (value, 1)
            assert [attempt.token for attempt in reader.attempts(task.task_id)] == [task.token]
    ledger.close()
