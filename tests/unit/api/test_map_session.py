"""A map works on its folder in one session, from its first chunk to its output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import muster
from muster.api.launch import Audience
from muster.api.map import run_map
from muster.api.maps.job import MapJob
from muster.api.start.options import MapSettings, SweepOptions
from muster.base.journal import read_journal
from muster.pipeline.sinks.formats import spec_of
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
