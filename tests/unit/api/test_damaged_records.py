"""Whatever JSON, or bytes, a record of a run folder holds: it is read, or said to be damaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples

from muster.api.gangs.train import _Refused
from muster.api.look.why import why
from muster.api.maps.publish import check_output, read_published, with_columns
from muster.api.report.about import time_facts
from muster.api.report.rank_failures import rank_failures
from muster.api.runs import Run
from muster.api.slurm.array import array_progress
from muster.base.errors import MusterError, SetupError
from muster.cli import output
from muster.cli.commands import look, tables
from muster.farm.executors.mailbox import has_assigned, read_heartbeat
from muster.monitor.sample import tasks_by_pid
from muster.pipeline.sinks.formats import spec_of
from muster.plan.compare import compare_run
from muster.rank.checkpoint import best_step, find_damage
from muster.rank.meter import remembered_micro_batch
from muster.rank.record import read_metrics
from muster.run.folder import RunFolder
from muster.run.record import read_run
from muster.run.state import last_word, live_picture
from muster.slurm.commands import read_job

RUN = {
    "run_id": "1", "name": "a", "kind": "train", "created_s": 1.5, "targets": [],
    "spec": {"program": {"target": "a:b"}, "train": {"task": "t"}, "config": {"num_steps": 5}},
    "fixed": {}, "code": {}, "options": {}, "argv": ["muster", "train"], "cwd": "/",
    "environment": {}, "format": 1,
}  # fmt: skip
START = {"time": "2026-01-01T00:00:00+00:00", "event": "start", "ranks": ["cpu:0"], "node": 0}
END = {"time": "2026-01-01T00:01:00+00:00", "event": "end", "node": 0, "exit_code": 1,
       "report": ["rank 1 of 2 failed: ValueError: x"]}  # fmt: skip
RESULTS = {
    "ended_because": "2 epochs", "metrics": {"val": {"loss": 0.5}}, "steps": 4, "epochs": 2,
    "num_ranks": 1, "parameters": 3, "device": "cpu", "strategy": "ddp", "global_batch": 2,
    "measured": {"data_wait_share": 0.1, "communication_share": None},
    "evaluations": [{"step": 2, "loss": 1.0}],
}  # fmt: skip
LINE = {"kind": "train", "step": 1, "epoch": 0, "samples": 2, "loss": 1.0, "lr": 0.1, "seconds": 1}
PICTURE = {
    "kind": "train", "step": 1, "total_steps": 4, "epoch": 0, "epochs": 2, "loss": 1.0,
    "eta_s": 3.0, "num_running": 1,
    "workers": [{"slot": "cpu:0", "state": "running", "task": "1", "elapsed_s": 1.0,
                 "progress": "", "pid": 7}],
}  # fmt: skip
FIGURE = {"value": 1.0, "origin": "table"}
PLAN = {
    "predictions": [{"num_devices": 1, "step": FIGURE, "samples_per_s": FIGURE, "wall": None,
                     "exposed": FIGURE, "loading": FIGURE}],
    "global_batch": 2, "strategy": "ddp", "num_steps": 4,
}  # fmt: skip
PUBLISHED = {"output": "/o", "size": 3, "mtime_ns": 1, "rows": 1, "rejected": 0, "dropped": 0,
             "rows_in": 1, "notes": []}  # fmt: skip
RANK_ERROR = {"type": "E", "message": "m", "frames": ["f"], "time_s": 1.0, "log_start": 3}


def status(folder: RunFolder) -> object:
    found = Run(folder.path).status()
    amount = output.amount(found.num_done, found.num_total, found.unit)
    return look._rank_lines(Run(folder.path), found), amount


def explained(folder: RunFolder) -> object:
    return why(Run(folder.path))


def refusal(folder: RunFolder) -> object:
    return _Refused(last_word(folder))


#: file → (a good record, who reads it)
READERS: dict[str, tuple[Any, list[Callable[[RunFolder], object]]]] = {
    "run.json": (RUN, [read_run, status, explained]),
    "events.jsonl": (END, [status, rank_failures, time_facts, explained]),
    "status.json": (PICTURE, [status, live_picture, tasks_by_pid]),
    "ending.json": (
        {"ending": "refused", "message": "m", "exit_code": 2},
        [status, refusal, explained],
    ),
    "training_results.json": (RESULTS, [status, compare_run]),
    "metrics.jsonl": (LINE, [status, lambda f: [*read_metrics(f.metrics)]]),
    "plan.json": (PLAN, [compare_run]),
    "published.json": (PUBLISHED, [read_published, lambda f: tables._output_of_map(Run(f.path))]),
    "publishing.json": (
        {"output": "/o"},
        [lambda f: check_output(f, spec_of(str(f.run_json) + ".csv"), overwrite=False)],
    ),
    "columns.json": ({"a": "int"}, [lambda f: with_columns(f, spec_of("o.jsonl"))]),
    "slurm/job.json": ({"job_id": "1", "script": "s", "argv": ["a"]}, [read_job]),
    "elements/array.json": (
        {"elements": 2, "share": "s"},
        [lambda f: array_progress(f, asks_slurm=False)],
    ),
    "logs/rank-1.error.json": (RANK_ERROR, [rank_failures]),
    "memory.json": ({"micro_batch": 3}, [lambda f: remembered_micro_batch(f.memory_json)]),
    "checkpoints/best.json": ({"step": 3}, [lambda f: best_step(f.checkpoints)]),
    "checkpoints/step-1/manifest.json": (
        {".metadata": [1, 2], "extra.json": [3, 4]},
        [lambda f: find_damage(f.checkpoints / "step-1")],
    ),
    "pilots/assignment.json": ({"a": 1}, [lambda f: has_assigned(f, {"a": 1})]),
    "pilots/beat": ("1 2 open", [read_heartbeat]),
}

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


@st.composite
def damaged(draw: st.DrawFn, record: Any) -> Any:
    """``record`` with one value in it, or all of it, replaced by any JSON or left out."""
    if isinstance(record, dict) and record and draw(st.integers(0, 9)):
        name = draw(st.sampled_from(sorted(record)))
        rest = {key: value for key, value in record.items() if key != name}
        return rest if not draw(st.integers(0, 5)) else {**rest, name: draw(damaged(record[name]))}
    if isinstance(record, list) and record and draw(st.integers(0, 3)):
        return [draw(damaged(record[0])), *record[1:]]
    return draw(JSON)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    place = RunFolder(tmp_path_factory.mktemp("runs") / "a")
    place.create()
    for name, (record, _) in READERS.items():
        (place.path / name).parent.mkdir(exist_ok=True, parents=True)
        (place.path / name).write_text(json.dumps(record))
    lines = [START, END]
    place.events.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for extra in ("logs/rank-0.log", "logs/rank-1.log", "run.json.csv"):
        (place.path / extra).write_text("x")
    return place


@pytest.mark.parametrize("name", READERS)
@examples(40)
@given(data=st.data())
def test_any_json_in_a_record_is_read_or_refused(folder: RunFolder, name: str, data: Any) -> None:
    good, readers = READERS[name]
    content = data.draw(damaged(good).map(lambda record: json.dumps(record).encode()))
    _check(folder, name, content, readers)


@pytest.mark.parametrize("elements", [2**40, 0, -1])
def test_an_array_that_no_cluster_has_is_damaged(folder: RunFolder, elements: int) -> None:
    """Its elements were listed until the memory of the machine was at its end."""
    before = folder.elements_json.read_bytes()
    folder.elements_json.write_text(json.dumps({"elements": elements}))
    try:
        with pytest.raises(SetupError, match=f"is damaged: it is of {elements:,} elements"):
            array_progress(folder, asks_slurm=False)
    finally:
        folder.elements_json.write_bytes(before)


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("content", [b"", b"\xff\xfe{", b'{"a"', b"[" * 100_000, b"null\n"])
def test_bytes_that_are_no_json_are_refused(folder: RunFolder, name: str, content: bytes) -> None:
    _check(folder, name, content, READERS[name][1])


def _check(
    folder: RunFolder, name: str, content: bytes, readers: list[Callable[[RunFolder], object]]
) -> None:
    path = folder.path / name
    before = path.read_bytes()
    if name.endswith(".jsonl"):  # a torn or odd line between good ones
        content = before + content + b"\n" + before
    path.write_bytes(content)
    try:
        for read in readers:
            try:
                read(folder)
            except MusterError as error:
                assert str(error)
    finally:
        path.write_bytes(before)
