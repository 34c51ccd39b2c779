"""One batch through a stage: what each record becomes, and who is to blame."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.pipeline.batch import BatchSize, OutOfMemory, Row, Step, apply
from muster.pipeline.stages import Reject


def rows_of(*values: int) -> list[Row]:
    return [Row(n, n, [{"id": n, "x": value}]) for n, value in enumerate(values)]


def records(rows: list[Row]) -> list[dict[str, Any]]:
    return [record for row in rows for record in row.records]


def reasons(rows: list[Row]) -> dict[int, str]:
    return {row.number: row.failures[0].reason for row in rows if row.failures}


def test_a_function_may_change_drop_multiply_and_reject() -> None:
    def stage(record: dict[str, Any]) -> Any:
        match record["x"]:
            case 0:
                return {"y": 1}
            case 1:
                return None
            case 2:
                return [{"y": 1}, {"y": 2}]
            case 3:
                raise Reject("too large")
        return 1 / 0

    rows = rows_of(0, 1, 2, 3, 4)
    apply(Step("s", one=stage), rows, keeps_ids=True)
    assert records(rows) == [{"id": 0, "y": 1}, {"y": 1, "id": "2.0"}, {"y": 2, "id": "2.1"}]
    assert reasons(rows) == {3: "too large", 4: "ZeroDivisionError: division by zero"}
    assert "in stage" in rows[4].failures[0].trace
    assert rows[3].failures[0].trace == ""  # meant, not an accident


@pytest.mark.parametrize("is_batched", [False, True])
def test_a_stage_that_calls_exit_fails_for_that_record(is_batched: bool) -> None:
    def stage(record: dict[str, Any]) -> Any:
        return sys.exit(3) if record["x"] == 1 else record

    rows = rows_of(0, 1, 2)
    step = Step("s", many=lambda batch: [stage(record) for record in batch])
    apply(step if is_batched else Step("s", one=stage), rows, keeps_ids=True)
    assert [r["x"] for r in records(rows)] == [0, 2]
    assert reasons(rows) == {1: "SystemExit: 3"}


def test_ids_lead_back_through_two_stages() -> None:
    def twice(record: dict[str, Any]) -> list[dict[str, Any]]:
        return [{**record}, {**record}]

    rows = rows_of(7)
    for _ in range(2):
        apply(Step("s", one=twice), rows, keeps_ids=True)
    assert [r["id"] for r in records(rows)] == ["0.0.0", "0.0.1", "0.1.0", "0.1.1"]


@given(st.lists(st.integers(0, 9), max_size=40), st.sets(st.integers(0, 9)))
def test_only_the_records_that_make_a_batch_raise_are_rejected(
    values: list[int], poison: set[int]
) -> None:
    def process(batch: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for record in batch:
            if record["x"] in poison:
                raise ValueError(f"cannot do {record['x']}")
            record["x"] += 100  # a stage may change what it is given
        return batch

    rows = rows_of(*values)
    apply(Step("s", many=process), rows, keeps_ids=True)
    good = [(n, value + 100) for n, value in enumerate(values) if value not in poison]
    assert [(r["id"], r["x"]) for r in records(rows)] == good
    assert set(reasons(rows)) == {n for n, value in enumerate(values) if value in poison}


@pytest.mark.parametrize("answer", [[], [{"a": 1}], [{"a": 1}] * 3, "text", None, 3])
def test_a_batch_stage_that_answers_for_another_number_of_records_is_told(answer: Any) -> None:
    calls = []

    def process(batch: list[dict[str, Any]]) -> Any:
        calls.append(len(batch))
        return answer

    rows = rows_of(1, 2)
    apply(Step("Caption", many=process), rows, keeps_ids=True)
    assert calls == [2], "one by one the same answer might pass for a good one"
    assert records(rows) == []
    for reason in reasons(rows).values():
        assert reason.startswith("process of Caption got 2 records and")
        if isinstance(answer, list):
            assert f"returned {len(answer)}: return one entry per record, None to drop" in reason
    assert set(reasons(rows)) == {0, 1}


def test_out_of_memory_changes_nothing_and_holds_no_frame() -> None:
    def process(batch: list[dict[str, Any]]) -> list[dict[str, Any]]:
        raise MemoryError("too much")

    rows = rows_of(1, 2, 3)
    with pytest.raises(OutOfMemory) as caught:
        apply(Step("s", many=process), rows, keeps_ids=True)
    assert str(caught.value) == "MemoryError: too much"
    assert caught.value.__cause__ is caught.value.__context__ is None
    assert [r["x"] for r in records(rows)] == [1, 2, 3]


def test_the_batch_halves_and_grows_again_but_not_beyond_its_start() -> None:
    size = BatchSize(32)
    assert size.shrink(32) == 16
    assert size.shrink(16) == 8
    for _ in range(10_000):
        size.good()
    assert size.now == 32


@given(st.lists(st.booleans(), max_size=200))
def test_the_batch_never_leaves_its_bounds(goods: list[bool]) -> None:
    size = BatchSize(20)
    for is_good in goods:
        size.good() if is_good else size.shrink(size.now)
        assert 1 <= size.now <= 20


def test_a_record_that_raised_is_tried_again_but_not_one_that_was_rejected() -> None:
    calls: list[int] = []

    def flaky(record: dict[str, Any]) -> Any:
        calls.append(record["x"])
        if record["x"] == 1:
            raise Reject("no")
        if record["x"] == 2 and calls.count(2) < 3:
            raise OSError("busy")
        if record["x"] == 3:
            raise OSError("always busy")
        return record

    for step in (
        Step("s", one=flaky, retries=2),
        Step("s", many=lambda batch: [flaky(record) for record in batch], retries=2),
    ):
        calls.clear()
        rows = rows_of(0, 1, 2, 3)
        apply(step, rows, keeps_ids=True)
        assert [r["x"] for r in records(rows)] == [0, 2]
        assert reasons(rows) == {1: "no", 3: "OSError: always busy"}
        assert calls.count(1) <= 3  # alone once, and in the batches that were halved


KINDS = ("same", "other", "none", "two", "list", "wrong", "raise", "reject", "exit", "fails once")


@given(st.lists(st.sampled_from(KINDS), min_size=1, max_size=12), st.booleans())
def test_each_record_is_given_once_and_fares_as_it_does_alone(
    kinds: list[str], keeps_ids: bool
) -> None:
    """Whatever becomes of the records before and after it in its batch."""

    def outcome(record: dict[str, Any]) -> Any:
        calls.append(record["id"])
        match KINDS[record["x"]]:
            case "same":
                return record
            case "other":
                return {"y": 1}
            case "none":
                return None
            case "two":
                return [{"y": 1}, record]
            case "list":
                return []
            case "wrong":
                return "text"
            case "raise":
                raise ValueError("bad")
            case "reject":
                raise Reject("no")
            case "exit":
                sys.exit(1)
        if calls.count(record["id"]) == 1:
            raise OSError("once")
        return record

    step = Step("s", one=outcome, retries=1)
    rows = rows_of(*map(KINDS.index, kinds))
    calls: list[int] = []
    apply(step, rows, keeps_ids=keeps_ids)
    tries = {"raise": 2, "exit": 2, "fails once": 2}
    assert calls == [n for n, kind in enumerate(kinds) for _ in range(tries.get(kind, 1))]
    for number, row in enumerate(rows):
        alone, calls = [Row(number, number, [{"id": number, "x": KINDS.index(kinds[number])}])], []
        apply(step, alone, keeps_ids=keeps_ids)
        assert row.records == alone[0].records
        assert [f.reason for f in row.failures] == [f.reason for f in alone[0].failures]
