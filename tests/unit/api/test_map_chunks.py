"""Into how many chunks a map is cut: by its workers, and as before where it goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import muster
from muster.api.map import preview
from muster.api.maps.job import MapJob
from muster.api.start.options import MapSettings, SweepOptions
from muster.pipeline.sinks.formats import spec_of
from muster.pipeline.sources.source import Selection
from muster.pipeline.stages import spec_of_object
from muster.run.folder import RunFolder


def same(record: dict[str, Any]) -> dict[str, Any]:
    return record


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_bytes(b"{}\n" * 19_200)
    return tmp_path


def chunks(
    devices: str, *, chunk_rows: int | None = None, selection: Selection | None = None, **how: Any
) -> int | None:
    job = MapJob(
        name="same",
        stages=(spec_of_object(same),),
        input="in.jsonl",
        output=spec_of("out.jsonl"),
        settings=MapSettings(chunk_rows=chunk_rows),
        selection=selection or Selection(),
    )
    how = {"run_dir": Path("run"), **how}
    return preview(job, SweepOptions(devices=devices, **how)).prepared.workload.total


def test_a_worker_gets_eight_chunks_where_neither_rows_nor_order_say_otherwise(
    place: Path,
) -> None:
    shuffled = Selection(shuffle_seed=1)  # an order of chunks, the same on any machine
    assert {
        "one": chunks("cpu:1"),
        "two": chunks("cpu:2"),
        "four": chunks("cpu:4"),
        "many": chunks("cpu:32"),
        "few rows": chunks("cpu:32", selection=Selection(limit=600)),
        "given rows": chunks("cpu:2", chunk_rows=4_800),
        "shuffled": chunks("cpu:2", selection=shuffled),
        "inline": chunks("cpu:2", executor="inline"),
    } == {
        "one": 16, "two": 16, "four": 32, "many": 64, "few rows": 2, "given rows": 4,
        "shuffled": 64, "inline": 16,
    }  # fmt: skip


def test_a_run_that_goes_on_with_other_workers_keeps_its_chunks(place: Path) -> None:
    muster.map(same, "in.jsonl", "out.jsonl", run_dir="run", executor="inline", keep_parts=True)
    assert chunks("cpu:32") == 16
    assert chunks("cpu:32", restart=True) == 64
    record = RunFolder(place / "run").run_json
    told = json.loads(record.read_text())
    for each in (told["fixed"], told["spec"]):
        assert each.pop("chunks") == 16
    record.write_text(json.dumps(told))  # as an earlier version has written it
    assert chunks("cpu:2") == 64
