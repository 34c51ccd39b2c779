"""Trainings that go on on other devices: every step is done once, and what cannot be is undone."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.processes import Commands
from tests.programs import read_program

from muster.api.gangs.train import _refusal_to_begin
from muster.gang.launch import GangEnding

Main = Callable[..., subprocess.CompletedProcess[str]]
STEPS = 128


class Training(Commands):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.run = path / "r"
        loss = "return (float('nan') if Path('sick').exists() else 1) * (model(batch[0])[:, 0]"
        text = read_program("slow_task.py").replace("return (model(batch[0])[:, 0]", loss, 1)
        (path / "slow_task.py").write_text(text)
        (path / "pace").write_text("0.5")

    def begin(self, *words: str, grace: str = "60") -> subprocess.Popen[bytes]:
        flags = ("--monitor-interval", "0", "--no-tensorboard", "--grace", grace)
        words = words or (
            "train", "slow_task.py:Slow", "--devices", "cpu:2", "--global-batch", "2",
            "--epochs", str(2 * STEPS // 64), "--run-dir", "r", *flags,
        )  # fmt: skip
        return super().begin(*words)

    @property
    def steps(self) -> list[int]:
        path = self.run / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        found = [json.loads(line) for line in lines if line.endswith("}")]
        return [one["step"] for one in found if one["kind"] == "train"]

    @property
    def ranks(self) -> list[int]:
        """How many each start had."""
        lines = (self.run / "events.jsonl").read_text().splitlines()
        return [len(e["ranks"]) for e in map(json.loads, lines) if e["event"] == "start"]

    def until_it_moves(self) -> None:
        known = len(self.steps)
        self.until(lambda: len(self.steps) > known)

    def until_it_is_heard(self) -> None:
        self.until((self.run / "requests/session").exists)

    def until_ranks(self, *numbers: int) -> None:
        self.until(lambda: self.ranks == list(numbers))

    def hurry(self) -> None:
        (self.path / "pace").write_text("0")


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    with Training(tmp_path) as made:
        yield made


def test_a_training_goes_on_with_fewer_ranks(training: Training, muster_main: Main) -> None:
    """A step takes longer than the grace, and an error after the move is no reason to go back."""
    process = training.begin(grace="0.1")
    training.until_it_is_heard()
    while (said := muster_main("devices", "r", "--only", "0,1")).returncode == 3:
        continue  # not answered before the first step
    assert "r: nothing changes" in said.stdout, said.stderr
    training.until_it_moves()
    said = muster_main("devices", "r", "--release", "1")
    assert "gives back cpu:1, once its ranks have saved" in said.stdout, said.stderr
    training.until_ranks(2, 1)
    assert "saved: asked to stop" in training.said, "no deadline has ended it"
    training.until_it_moves()
    (training.path / "sick").touch()
    assert process.wait(300) == 1, training.said
    assert "devices that it had" not in training.said
    (training.path / "sick").unlink()
    training.hurry()
    assert training.begin("resume", "r").wait(300) == 0, training.said
    assert training.ranks == [2, 1, 1]
    assert training.steps == list(range(1, STEPS + 1)), "each step once"


@pytest.mark.slow
def test_an_agent_goes_on_with_fewer_ranks_and_with_more(
    training: Training, muster_main: Main
) -> None:
    words = (
        "train",
        "ppo",
        "--num-envs",
        "4",
        "--num-steps",
        "1000000000",
        "--devices",
        "cpu:2",
        "--monitor-interval",
        "0",
        "--no-tensorboard",
        "--grace",
        "120",
        "--run-dir",
        "r",
    )
    process = training.begin(*words)
    training.until_it_is_heard()
    for change, answer, ranks in (
        (("--release", "1"), "gives back cpu:1, once its ranks have saved", (2, 1)),
        (("--add", "1"), "takes cpu:", (2, 1, 2)),
        (("--only", "cpu:1"), "gives back", (2, 1, 2, 1)),
    ):
        while (said := muster_main("devices", "r", *change)).returncode == 3:
            assert process.poll() is None, training.said  # not answered before the first step
        assert answer in said.stdout, (said, training.said)
        training.until_ranks(*ranks)
    lines = (training.run / "metrics.jsonl").read_text().splitlines()
    so_far = max(json.loads(line).get("step", 0) for line in lines if line.endswith("}"))
    process.terminate()
    assert process.wait(300) == 75, training.said
    lines = (training.run / "metrics.jsonl").read_text().splitlines()
    assert max(json.loads(line).get("step", 0) for line in lines) >= so_far, "nothing is undone"


REFUSED = {"ending": "refused", "message": "a NaN"}


@pytest.mark.parametrize(
    ("word", "ending", "wanted"),
    [
        ({**REFUSED, "phase": "setup"}, {}, "a NaN"),
        ({**REFUSED, "phase": "evaluation"}, {}, ""),
        (REFUSED, {}, ""),
        ({"ending": "requeue"}, {}, ""),
        ({**REFUSED, "phase": "setup"}, {"stopped_by": "SIGINT"}, ""),
        ({**REFUSED, "phase": "setup"}, {"restarts": 1}, ""),
    ],
)
def test_only_ranks_that_could_not_begin_go_back(
    word: dict[str, str], ending: dict[str, Any], wanted: str
) -> None:
    assert _refusal_to_begin(GangEnding(exit_code=2, word=word, **ending)) == wanted


@pytest.mark.slow
def test_more_ranks_than_can_be_then_killed_and_interrupted(
    training: Training, muster_main: Main
) -> None:
    process = training.begin()
    training.until_it_moves()
    assert "takes cpu:2" in muster_main("devices", "r", "--add", "1").stdout
    training.until_ranks(2, 3, 2)  # a batch of 2 is too small for 3
    training.until_it_moves()
    assert "It keeps the devices that it had" in training.said
    assert not (training.run / "devices.json").exists()
    muster_main("devices", "r", "--release", "1")
    process.send_signal(signal.SIGKILL)
    process.wait()
    refused = muster_main("devices", "r", "--add", "1")
    assert (refused.returncode, "muster resume r --devices N" in refused.stderr) == (2, True)
    process = training.begin("resume", "r")
    training.until_it_moves()
    assert training.ranks[-1] == 1, "what was answered holds"
    muster_main("devices", "r", "--add", "1")
    process.send_signal(signal.SIGINT)
    assert process.wait(300) == 130, "asked to end while it moves, it ends"
    training.hurry()
    assert training.begin("resume", "r").wait(300) == 0
    assert training.ranks[-1] == 2
    assert sorted(set(training.steps)) == list(range(1, STEPS + 1))
