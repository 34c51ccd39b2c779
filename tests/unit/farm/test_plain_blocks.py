"""Blocks of tasks of which there is little to say are read as a whole: the same table comes of them
as of each task for itself.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from muster.farm import rows
from muster.farm.canonical import encode, payload_and_key
from muster.farm.export import export
from muster.farm.ledger import columns
from muster.farm.ledger.columns import Plain
from muster.farm.ledger.read import LedgerReader
from muster.farm.ledger.store import Ledger
from muster.farm.task import AttemptRecord, Finished, NewTask, Outcome, SlotSpec
from muster.run.folder import RunFolder

#: A tenth of what is read at once otherwise; the last block is not full.
NUM, ODD, BLOCK = 130, 70, 100
Values = dict[str, object]

HOSTILE: list[Values] = [
    {"y": math.nan},
    {"y": -math.inf},
    {"y": 2**63},
    {"y": 2**64 - 1},
    {"y": -(2**63)},
    {"y": 2**70},
    {"y": 2**53 + 1},
    {"y": 1e300},
    {"y": 5e-324},
    {"y": 0.1 + 0.2},
    {"y": -0.0},
    {"y": 1.0},
    {"y": 7},
    {"y": True},
    {"y": None},
    {},
    {"y": ""},
    {"y": 'ü\u2028\n"\\,{}'},
    {"y": "\udcff"},
    {"y": "\\udcff"},
    {"y": "$x"},
    {"y": '{"$float": "nan"}'},
    {"y": "2026-11-24 10:00:00"},
    {"y": "=1+1"},
    {"y": []},
    {"y": [1, None, 2.5]},
    {"y": 1, "late": "first seen here"},
    {"another": 1},
    {"$a": 1},
    {"\udcff": 1},
    {"ü": 1},
    {"x": "named like a parameter", "state": "and like a column"},
    {"y": "long" * 2_000},
]


def make_run(
    place: Path,
    params_of: Callable[[int], Values],
    value_of: Callable[[int], Values],
    *,
    token_of: Callable[[int], int] = lambda number: 1,
    target_of: Callable[[int], str] = lambda number: "f",
) -> RunFolder:
    """Tasks that all are done; the functions say what each, by its number, is and has given."""
    folder = RunFolder(place)
    folder.create()
    ledger = Ledger(folder.ledger)
    ledger.begin()
    for worker, code in ((1, "abcdef01" * 2), (2, "abcdef01" * 2)):
        slot = SlotSpec(slot_id=worker - 1, label=f"cpu:{worker - 1}", devices=())
        ledger.worker_started(worker, slot, "h", "l", code)
    for number in range(1, NUM + 1):
        name = target_of(number)
        payload, key = payload_and_key(name)(params_of(number))
        ledger.add_tasks([NewTask(key, ledger.target_id(name), payload)])
    tasks = [task._replace(token=token_of(task.task_id)) for task in ledger.claim(NUM)]
    ledger.retoken(tasks)
    assert len(tasks) == NUM
    records = [
        AttemptRecord(task.task_id, task.token, 1 + task.task_id % 2,
                      Finished(task.task_id, task.token, Outcome.OK, 0.0, 0.1 * task.task_id, 0, 0,
                               None if task.task_id % 3 else 20.5))
        for task in tasks
    ]  # fmt: skip
    ledger.record_done(records, [(encode(value_of(task.task_id)), None) for task in tasks])
    ledger.commit()
    ledger.close()
    return folder


def check(folder: RunFolder, monkeypatch: pytest.MonkeyPatch, *, is_plain: bool = True) -> None:
    """All three files are the same byte for byte, whether blocks are read as a whole or not."""

    monkeypatch.setattr(rows, "_CHUNK", BLOCK)

    def files(place: str) -> list[bytes]:
        (folder.path / place).mkdir()
        paths = [folder.path / place / f"t.{suffix}" for suffix in ("csv", "jsonl", "parquet")]
        assert [export(folder, path) for path in paths] == [NUM] * 3
        return [path.read_bytes() for path in paths]

    with LedgerReader(folder.ledger) as ledger:
        found = [isinstance(block, Plain) for block in ledger.whole(BLOCK)]
        assert found == [is_plain, False], "the last block is not full"
    at_once = files("at-once")
    monkeypatch.setattr(columns, "_TRIES", -1)  # none is tried
    with LedgerReader(folder.ledger) as ledger:
        assert not any(isinstance(block, Plain) for block in ledger.whole(BLOCK))
    assert files("one-by-one") == at_once


@pytest.mark.parametrize(
    "usual",
    [
        3,
        pytest.param(0.5, marks=pytest.mark.thorough),
        pytest.param("text", marks=pytest.mark.thorough),
    ],
)
@pytest.mark.parametrize("odd", HOSTILE, ids=lambda odd: ascii(odd)[:40])
def test_whatever_one_task_has_returned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, odd: Values, usual: object
) -> None:
    folder = make_run(
        tmp_path / "run",
        lambda number: {"x": number},
        lambda number: odd if number == ODD else {"y": usual},
    )
    check(folder, monkeypatch)


@pytest.mark.parametrize(
    "odd",
    [
        {"x": {"lr": 0.1, "of": {"deep": 1}}},
        {"x": math.nan},
        {"x": 2**64 - 1},
        {"x": "1e5"},
        {"x": "x" * 5_000},
        {"x": 1, "late": None},
        {},
    ],
    ids=lambda odd: ascii(odd)[:40],
)
def test_whatever_one_task_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, odd: Values
) -> None:
    folder = make_run(
        tmp_path / "run",
        lambda number: odd if number == ODD else {"x": number},
        lambda number: {"y": number / 3},
    )
    check(folder, monkeypatch, is_plain="x" * 5_000 not in odd.values())


def test_tasks_without_parameters_that_return_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_run(tmp_path / "run", lambda number: {"x": number}, lambda number: {})
    check(folder, monkeypatch)


def test_values_of_a_command_that_are_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_run(
        tmp_path / "run",
        lambda number: {"id": str(number) if number != ODD else "1" * 30},
        lambda number: {"y": number},
        target_of=lambda number: "python t.py --id {id}",
    )
    check(folder, monkeypatch)


@pytest.mark.parametrize("what", ["tokens", "targets", "attempts"])
def test_tasks_that_are_not_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    folder = make_run(
        tmp_path / "run",
        lambda number: {"x": number},
        lambda number: {"y": number},
        token_of=lambda number: 2 if number == ODD and what == "tokens" else 1,
        target_of=lambda number: "g" if number == ODD and what == "targets" else "f",
    )
    if what == "attempts":  # as many as tasks; somebody has changed whose one of them is
        with closing(sqlite3.connect(folder.ledger)) as ledger, ledger:
            words = "UPDATE attempts SET task_id = task_id + 1, token = 2 WHERE task_id = ?"
            ledger.execute(words, (ODD,))
    check(folder, monkeypatch, is_plain=False)


def test_tasks_of_a_higher_token_are_as_plain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_run(
        tmp_path / "run",
        lambda number: {"x": number},
        lambda number: {"y": number},
        token_of=lambda number: 3,
    )
    check(folder, monkeypatch)
