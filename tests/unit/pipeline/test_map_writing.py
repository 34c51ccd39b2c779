"""Rows as journal lines: in order whatever the order of completion, exact whatever the values."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections import Counter
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from muster.base.errors import TargetError
from muster.pipeline.batch import Failure, Row
from muster.pipeline.journal import Journal
from muster.pipeline.worker import MapPlan
from muster.pipeline.writing import RowWriter


def counters(*, keep_going: bool = False) -> Any:
    plan = MapPlan(source={"columns": []}, stages=(), base_folder="", keep_going=keep_going)
    return SimpleNamespace(
        plan=plan, num_rows=0, num_rejected=0, num_stored=0, num_rejects_stored=0,
        rejected_in=Counter(),
    )  # fmt: skip


def bad(number: int) -> Row:
    return Row(number, number, [], [Failure("s", f"bad {number}")])


def good(number: int, **values: Any) -> Row:
    return Row(number, number, [{"id": number, **values}])


def test_rejects_before_the_first_success_are_stored_as_what_they_are(tmp_path: Path) -> None:
    """They come as they are completed: 0, 5, 2 are no gapless range, whatever ends it has."""
    journal = Journal(tmp_path, "k")
    writer = RowWriter(counters(), journal, lambda row: row)
    for number in (0, 5, 2):
        writer.store([bad(number)])
    writer.store([good(7)])
    assert list(journal.missing(0, 8)) == [(1, 2), (3, 5), (6, 7)]
    for number in (6, 1, 4, 3):
        writer.store([good(number)])
    writer.end()
    journal.finish()
    kept = [json.loads(line)["id"] for line in journal.rows_path.read_text().splitlines()]
    lost = [json.loads(line)["row"] for line in journal.bad_path.read_text().splitlines()]
    assert (kept, lost) == ([1, 3, 4, 6, 7], [0, 2, 5])
    journal.close()


def test_rows_count_once_they_are_in_the_journal(tmp_path: Path) -> None:
    """Those that wait for a first success are done again where their worker ends before it."""
    journal, worker = Journal(tmp_path, "k"), counters()
    writer = RowWriter(worker, journal, lambda row: row)

    def counted() -> tuple[int, int, int]:
        return worker.num_stored, worker.num_rejects_stored, worker.rejected_in["s"]

    several = Row(1, 1, [], [Failure("s", "bad")] * 3)  # it became three records
    writer.store([bad(0), several])
    assert counted() == (0, 0, 0)
    writer.store([good(2)])
    assert counted() == (3, 2, 4)
    writer.store([bad(3), good(4)])
    assert counted() == (5, 3, 5)
    journal.close()
    assert worker.num_stored == journal.num_done


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_completion_stores_each_row_once(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    rows = [bad(n) if rng.random() < 0.4 else good(n) for n in range(40)]
    journal = Journal(tmp_path, "k")
    writer = RowWriter(counters(keep_going=seed % 2 == 0), journal, lambda row: row)
    waiting = list(rows)
    rng.shuffle(waiting)
    while waiting:
        batch = [waiting.pop() for _ in range(min(len(waiting), rng.randint(1, 5)))]
        writer.store(sorted(batch, key=lambda row: row.number))
    writer.end()
    totals = journal.finish()
    assert totals.num_rows + totals.num_rejects == 40
    kept = [json.loads(line)["id"] for line in journal.rows_path.read_text().splitlines()]
    assert kept == [row.number for row in rows if row.records]
    journal.close()


def test_numbers_keep_all_of_their_digits(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "k")
    writer = RowWriter(counters(), journal, lambda row: row)
    writer.store(
        [good(0, big=2**80), good(1, price=Decimal("1.10")), good(2, raw=object()), good(3)]
    )
    writer.end()
    journal.finish()
    first, second, third = (json.loads(line) for line in journal.rows_path.read_text().splitlines())
    assert (first["big"], second["price"], third["id"]) == (2**80, "1.10", 3)
    [error] = (json.loads(line) for line in journal.bad_path.read_text().splitlines())
    assert error["stage"] == "write"
    assert error["record"]["id"] == 2
    assert error["record"]["raw"].startswith("<object object")
    assert "JSON has no object" in error["reason"]
    journal.close()


@pytest.mark.parametrize("keeps_types", [False, True])
def test_beside_a_long_integer_what_is_no_number_is_null(tmp_path: Path, keeps_types: bool) -> None:
    journal, about = Journal(tmp_path, "k"), counters()
    about.plan = dataclasses.replace(about.plan, keeps_types=keeps_types)
    values = {"deep": [{"big": -(2**70)}], "nan": math.nan, "list": [math.inf, 1.5]}
    RowWriter(about, journal, lambda row: row).store([good(0, **values)])
    journal.finish()
    journal.close()

    def refuse(text: str) -> None:
        raise AssertionError(f"{text} is not JSON")

    found = json.loads(journal.rows_path.read_text(), parse_constant=refuse)
    assert found == {"id": 0, "deep": [{"big": -(2**70)}], "nan": None, "list": [None, 1.5]}


def test_records_that_cannot_be_written_stop_a_run_like_others_that_all_fail(
    tmp_path: Path,
) -> None:
    journal = Journal(tmp_path, "k")
    writer = RowWriter(counters(), journal, lambda row: row)
    with pytest.raises(TargetError, match="JSON has no object"):
        writer.store([good(n, raw=object()) for n in range(200)])
    assert journal.num_done == 0
    journal.close()


def test_a_text_that_cannot_be_written_is_kept_beside_its_row(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "k")
    writer = RowWriter(counters(keep_going=True), journal, lambda row: row)
    writer.store([good(0, name="\ud800", score=0.5)])
    writer.end()
    journal.finish()
    error = json.loads(journal.bad_path.read_text())
    assert error["record"] == {"id": 0, "name": "\ud800", "score": 0.5}


def test_ids_that_a_stage_has_made_are_told(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "k")
    writer = RowWriter(counters(), journal, lambda row: row + 10)
    writer.store([Row(0, 10, [{"id": 10}]), Row(1, 11, [{"id": "11.0"}, {"id": "11.1.0"}])])
    assert not writer.has_own_ids
    for number, ids in enumerate([[10], [13, 13], ["14.0", "14.0"], ["b"], [None]], start=2):
        fresh = RowWriter(counters(), Journal(tmp_path, f"k{number}"), lambda row: row + 10)
        fresh.store([Row(number, 10 + number, [{"id": value} for value in ids])])
        assert fresh.has_own_ids, ids
    journal.close()
    # What the rows of an attempt that was killed had is not known.
    assert RowWriter(counters(), Journal(tmp_path, "k"), lambda row: row + 10).has_own_ids


@pytest.mark.parametrize("key", ["\x01muster", "\x01raw"])
def test_keys_of_our_own_files_are_refused_at_any_depth(tmp_path: Path, key: str) -> None:
    """Read again, such a line would be taken for a value that JSON does not know."""
    ours = {key: "bytes", "value": "AAAA"}
    journal = Journal(tmp_path, "k")
    writer = RowWriter(counters(keep_going=True), journal, lambda row: row)
    writer.store([good(0, **ours), good(1, a=ours), good(2, a=[{"b": (1, [ours])}])])
    writer.store([good(3, a=key), good(4, a=[{"b": key}])])
    writer.end()
    journal.finish()
    kept = [json.loads(line) for line in journal.rows_path.read_text().splitlines()]
    assert kept == [{"id": 3, "a": key}, {"id": 4, "a": [{"b": key}]}]
    errors = [json.loads(line) for line in journal.bad_path.read_text().splitlines()]
    assert [(e["row"], e["stage"], "rename it" in e["reason"]) for e in errors] == [
        (row, "write", True) for row in range(3)
    ]
    journal.close()


@pytest.mark.parametrize("own", [2**70, [-(2**64)], "\ud800"])
def test_a_reject_with_an_id_that_is_hard_to_write_is_kept(tmp_path: Path, own: Any) -> None:
    journal = Journal(tmp_path, "k")
    made = {"id": own, "more": 2**65, "ratio": 0.5}
    writer = RowWriter(counters(keep_going=True), journal, lambda row: row)
    writer.store([Row(0, own, [], [Failure("s", "bad")]), Row(1, 1, [], [Failure("s", "b")])])
    writer.store([Row(2, own, [], [Failure("s", "bad", record=made)])])
    writer.end()
    journal.finish()
    errors = [json.loads(line) for line in journal.bad_path.read_text().splitlines()]
    assert [error["id"] for error in errors] == [own, 1, own]
    assert errors[2]["record"] == made
    journal.close()
