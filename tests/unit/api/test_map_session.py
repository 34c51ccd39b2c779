"""A map works on its folder in one session, from its first chunk to its output."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.conftest import MusterCli

import muster
from muster.api.launch import Audience
from muster.api.map import run_map
from muster.api.maps import plan
from muster.api.maps.job import MapJob
from muster.api.start.options import MapSettings, SweepOptions
from muster.base.journal import read_journal
from muster.pipeline.sinks.formats import spec_of
from muster.pipeline.sources import files
from muster.pipeline.stages import spec_of_object
from muster.run.folder import RunFolder
from muster.run.session import is_held


def same(record: dict[str, Any]) -> dict[str, Any]:
    return record


def twice(record: dict[str, Any]) -> dict[str, Any]:
    return {"n": 2 * record["n"]}


@pytest.mark.parametrize("unordered", [False, True])
def test_nobody_else_gets_the_folder_before_the_output_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unordered: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text('{"n": 1}\n' * 3)
    folder, held = RunFolder(tmp_path / "run"), list[bool]()

    def say(line: str) -> None:
        if line == "writing the output":
            held.append(is_held(folder))

    job = MapJob(
        name="same",
        stages=(spec_of_object(same),),
        input="in.jsonl",
        output=spec_of("out.jsonl"),
        settings=MapSettings(unordered=unordered),
    )
    options = SweepOptions(run_dir=folder.path, executor="inline", monitor_interval_s=0)
    assert run_map(job, options, Audience(say=say)).num_out == 3
    assert held == [True]
    assert not is_held(folder)
    events = [line["event"] for line in read_journal(folder.events)]
    assert (events.count("start"), events.count("end")) == (1, 1)


def test_a_relative_folder_means_another_run_in_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two maps of one process: the second one went through the stages of the first one."""
    for name, stage in (("a", same), ("b", twice)):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        Path("in.jsonl").write_text('{"n": 1}\n')
        muster.map(
            stage, "in.jsonl", "out.jsonl", run_dir="run", executor="inline", monitor_interval_s=0
        )
    assert Path("out.jsonl").read_text() == '{"id":0,"n":2}\n'
    muster.map(
        same, "in.jsonl", "out.jsonl", run_dir="run", executor="inline", monitor_interval_s=0,
        restart=True,
    )  # fmt: skip
    assert Path("out.jsonl").read_text() == '{"id":0,"n":1}\n'


def test_a_large_parquet_file_that_was_touched_is_the_one_that_0_1_0_knew_by_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, muster_main: MusterCli
) -> None:
    """Its time was in the hash: a file that was copied back, or touched, was another plan."""
    for module in (files, plan):
        monkeypatch.setattr(module, "HASHED_WHOLE", 100)
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"n": list(range(500))}), path)
    (tmp_path / "work.py").write_text("def same(record):\n    return record\n")
    words = "map work.py:same --input in.parquet --output out.jsonl --on inline --run-dir m".split()
    done = muster_main(*words)
    assert done.returncode == 0, done.stderr
    of_then = files.fingerprint(path, always_timed=True)
    for name in ("run.json", "map.json"):
        text = (tmp_path / "m" / name).read_text()
        now = files.fingerprint(path)["hash"]
        assert now in text and now != of_then["hash"]
        (tmp_path / "m" / name).write_text(text.replace(now, of_then["hash"]))
    for second in (1, 2, 3):  # what is known of the time of then outlives each start
        os.utime(path, (second, second))
        for again in (words, ["resume", "m"], [*words, "--dry-run"]):
            done = muster_main(*again)
            assert done.returncode == 0, done.stderr
    pq.write_table(pa.table({"n": list(range(1, 501))}), path)
    refused = muster_main(*words)
    assert refused.returncode == 2 and "another plan" in refused.stderr, refused


@pytest.mark.thorough
def test_workers_of_a_new_map_begin_before_its_input_is_read_and_those_of_an_old_one_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    stage = "import sys\n\ndef tell(record):\n    return {'last': sys.orig_argv[-1]}\n"
    (tmp_path / "stages.py").write_text(stage)
    (tmp_path / "in.jsonl").write_text('{"n": 1}\n' * 3)

    def mapped() -> set[str]:
        muster.map("stages.py:tell", "in.jsonl", "out.jsonl", devices="cpu:1", run_dir="run")
        return {json.loads(line)["last"] for line in Path("out.jsonl").read_text().splitlines()}

    assert mapped() == {"muster.pipeline.chunk"}  # what such a worker is told to import
    Path("out.jsonl").unlink()
    for name in ("published.json", "ledger.sqlite"):  # as if it had been killed at its start
        (tmp_path / "run" / name).unlink()
    assert mapped() != {"muster.pipeline.chunk"}
