"""A pilot's answers, without Ray: its executor and its worker are real."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from pathlib import Path

import pytest

from muster.farm import canonical, wire
from muster.farm.events import Results, WorkerReady
from muster.farm.executors import remote
from muster.farm.executors.ray_pilot import GATHER_S, Pilot, PilotSetup, digest_of, muster_version
from muster.farm.task import SlotSpec, TargetSpec, Task
from muster.run.folder import RunFolder

COUNT = 200


def setup_of(folder: Path, target: Path, token: str = "t") -> PilotSetup:
    """Of a run in this folder, which a pilot sees that is told the token ``t``."""
    run = RunFolder(folder / "run")
    run.create()
    run.pilot_token.parent.mkdir(parents=True, exist_ok=True)
    run.pilot_token.write_text("t")
    spec = TargetSpec(name="work", location=str(target), attribute="work")
    return PilotSetup(
        version=muster_version(), run_path=str(run.path), token_path=str(run.pilot_token),
        token=token, run_id="0" * 32, slot_id=0, targets={"1": dataclasses.asdict(spec)},
        roots=[str(folder)], digests={str(target): digest_of(target)}, kept_code="",
        input_files={},
    )  # fmt: skip


async def answers_of(folder: Path) -> tuple[int, float, set[int]]:
    """How many answers with results came in how many seconds, and the tasks that are in them."""
    target = folder / "work.py"
    target.write_text("import time\ndef work(i):\n    time.sleep(0.002)\n    return {'i': i}\n")
    setup = setup_of(folder, target)
    pilot, reader = Pilot(), remote.EventReader()
    assert (await pilot.open(setup.to_json()))["is_shared"]
    try:
        tasks = [
            Task(n, n.to_bytes(16, "big"), 1, canonical.encode({"i": n}), 0, 1, 0)
            for n in range(1, COUNT + 1)
        ]
        await pilot.apply(0, remote.start_command(1, SlotSpec(slot_id=0, label="cpu", devices=())))
        answers, begin, done = 0, 0.0, set[int]()
        while len(done) < COUNT:
            events = [*reader.read(wire.unpack(bytearray(await pilot.poll())))]
            if any(isinstance(event, WorkerReady) for event in events):
                begin = time.monotonic()
                await pilot.apply(1, remote.pass_command(1, tasks, together=False))
            found = [item for e in events if isinstance(e, Results) for item in e.finished]
            answers += bool(found)
            done |= {item.task_id for item in found}
        return answers, time.monotonic() - begin, done
    finally:
        await pilot.close()


def test_results_of_short_tasks_travel_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the pilot changes it
    answers, seconds, done = asyncio.run(asyncio.wait_for(answers_of(tmp_path), 60))
    assert done == set(range(1, COUNT + 1))
    # One for each time that it let gather, one for the last, and some for the ticks between.
    assert answers <= 3 + seconds / GATHER_S * 1.2, (answers, seconds)


def test_a_pilot_that_hears_nothing_more_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that is killed because its run was over when a node had room for it at last."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    setup = setup_of(tmp_path, tmp_path / "work.py", token="of another folder")
    assert not asyncio.run(Pilot().open(setup.to_json()))["is_shared"]
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize("version", ["0.0.1", "99.9"])
def test_a_pilot_of_another_version_says_which_it_is_and_does_nothing(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever else an older or a newer coordinator tells it."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    record = {"version": version, "of_another_time": [1], "run_path": str(tmp_path / "run")}
    about = asyncio.run(Pilot().open(json.dumps(record).encode()))
    assert about.keys() == {"version", "python", "host"} and about["version"] == muster_version()
    assert list(tmp_path.iterdir()) == []
