"""The table of so many tasks that its columns are those of some, unless another task differs."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from muster.farm.canonical import encode, payload_and_key
from muster.farm.export import export, refresh
from muster.farm.ledger import columns
from muster.farm.ledger.store import Ledger
from muster.farm.table import OtherColumns, batches
from muster.farm.task import AttemptRecord, Finished, NewTask, Outcome, SlotSpec
from muster.run.folder import RunFolder

NUM = 9_000
ODD = 1_005  # not among those that are looked at first


def run(place: Path, odds: dict[int, dict[str, object]]) -> RunFolder:
    """Tasks of which some have other results, one had to be tried again and one has failed."""
    folder = RunFolder(place / "run")
    folder.create()
    ledger = Ledger(folder.ledger)
    ledger.begin()
    number = ledger.target_id("f")
    make = payload_and_key("f")
    made = (make({"x": x}) for x in range(NUM))
    ledger.add_tasks(NewTask(key, number, payload) for payload, key in made)
    ledger.worker_started(1, SlotSpec(slot_id=0, label="cpu0", devices=()), "h", "l")
    tasks = ledger.claim(NUM)
    good = Finished(0, 1, Outcome.OK, 0.0, 0.5, 0, 0, 20.0)
    bad = good._replace(outcome=Outcome.EXCEPTION, message="no luck")
    ends = [AttemptRecord(t.task_id, 1, 1, good._replace(task_id=t.task_id)) for t in tasks]
    again = tasks[10]._replace(token=2)
    ledger.record_tried([(ends[10]._replace(finished=bad), again)])
    ends[10] = ends[10]._replace(token=2)
    ledger.record_failed([ends.pop(20)._replace(finished=bad)])
    values = [odds.get(r.task_id, {"y": r.task_id, "text": None}) for r in ends]
    ledger.record_done(ends, [(encode(value), None) for value in values])
    ledger.commit()
    ledger.close()
    return folder


@pytest.mark.parametrize(
    "odd",
    [
        {"y": 1, "text": None},
        {"y": 1},
        {"y": 1.0, "text": None},
        {"y": 2**70, "text": None},
        {"y": float("nan"), "text": None},
        {"y": 1, "text": "none had one"},
        {"y": 1, "text": None, "another": 1},
        {"another": [1]},
    ],
)
def test_it_is_that_of_a_look_at_all(
    tmp_path: Path, odd: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run(tmp_path, {ODD: odd})
    with monkeypatch.context() as one_by_one:  # at each task for itself
        one_by_one.setattr(columns, "_TRIES", -1)
        schema, stream = batches(folder)
        sure = pa.Table.from_batches(stream, schema=schema)
    refresh(folder)
    written = pq.read_table(folder.results_parquet)
    assert written.schema == schema
    assert written.to_pylist().__repr__() == sure.to_pylist().__repr__()
    assert export(folder, tmp_path / "t.jsonl") == NUM
    line = (tmp_path / "t.jsonl").read_bytes().splitlines()[ODD - 1]
    assert line.startswith(encode({"x": ODD - 1, **odd})[:-1])
    assert {path.name for path in folder.path.iterdir() if "tmp" in path.name} == set()


def test_a_whole_number_that_a_column_of_floats_would_round(tmp_path: Path) -> None:
    floats: dict[int, dict[str, object]] = {n: {"y": 0.5} for n in range(1, NUM + 1)}
    folder = run(tmp_path, {**floats, ODD: {"y": 2**63}})
    refresh(folder)
    written = pq.read_table(folder.results_parquet).column("y").to_pylist()
    assert written[ODD - 1 : ODD + 1] == [str(2**63), "0.5"]


def test_columns_by_some_are_given_up_where_another_task_differs(tmp_path: Path) -> None:
    """Or the other tests here would say nothing."""
    _, stream = batches(run(tmp_path, {ODD: {"y": 1.0, "text": None}}), by_some=True)
    with pytest.raises(OtherColumns):
        list(stream)


def test_the_order_of_the_columns_is_that_in_which_tasks_first_had_them(tmp_path: Path) -> None:
    folder = run(tmp_path, {ODD: {"b": 1}, 1_126: {"c": 1}, 2_300: {"b": 1}})
    schema, _ = batches(folder, by_some=True)
    assert schema.names[:5] == ["x", "y", "text", "b", "c"]


def test_attempts_and_errors_are_those_of_each_task(tmp_path: Path) -> None:
    folder = run(tmp_path, {})
    refresh(folder)
    rows = pq.read_table(folder.results_parquet).slice(8, 14).to_pylist()
    assert [row["attempts"] for row in rows] == [1, 1, 2, *[1] * 11]
    assert [row["state"] for row in rows].index("failed") == 12
    assert [row["error"] for row in rows][10:] == [None, None, "raised an exception: no luck", None]
