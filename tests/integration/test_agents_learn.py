"""Policies that learn: a memory task here, CartPole and the market in the slow runs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from tests.conftest import MusterCli
from torch import Tensor

from muster.agents import (
    AgentTask,
    BatchedEnv,
    Change,
    Discrete,
    Entry,
    EnvSpec,
    Observation,
    Place,
    Policy,
    RecurrentPolicy,
    Split,
    VectorEnv,
    streams,
)
from muster.rl.config import PpoConfig
from muster.rl.loop import train_agent
from muster.run.folder import RunFolder

LENGTH = 5


class Recall(BatchedEnv):
    """A bit is shown at the first step and asked for at the last."""

    def __init__(self, place: Place) -> None:
        spec = EnvSpec(
            name="recall",
            num_envs=place.num_envs,
            actions=Discrete(2),
            observation={"observation": Entry((2,))},
            extras=("right",),
        )
        super().__init__(spec, place)

    def fresh(self) -> dict[str, Tensor]:
        bit = streams.integers(self.place.seed, streams.EPISODE, self.index, self.episode, 2)
        return {"bit": bit, "step": torch.zeros_like(bit)}

    def observe(self) -> Observation:
        shown = (2 * self.rows["bit"] - 1) * (self.rows["step"] == 0)
        return {"observation": torch.stack([shown, self.rows["step"]], 1).float()}

    def advance(self, actions: Tensor) -> Change:
        step = self.rows["step"] + 1
        is_over = step == LENGTH
        right = ((actions == self.rows["bit"]) & is_over).float()
        self.rows = {**self.rows, "step": step}
        return Change(right, is_over, torch.zeros_like(is_over), {"right": right})


@dataclass
class Recaller(AgentTask):
    memory: Literal["lstm", "none"] = "lstm"

    def environments(self, split: Split, place: Place) -> VectorEnv:
        return Recall(place)

    def policy(self, spec: EnvSpec) -> Policy:
        return RecurrentPolicy(spec, memory=self.memory, hidden=32, layers=(32,))


def right_answers(memory: Literal["lstm", "none"], folder: Path) -> float:
    """Share of right answers after the training."""
    config = PpoConfig(
        num_envs=32, rollout_steps=20, batch_size=8, num_steps=19_200, lr=3e-3,
        eval_frequency=0, eval_episodes=200, tensorboard=False,
    )  # fmt: skip
    place = RunFolder(folder)
    place.create()
    found = train_agent(Recaller(memory=memory), config, place, None, lambda line: None)
    assert found is not None
    share: float = found["metrics"]["test"]["right"]
    return share


def test_what_must_be_remembered_needs_a_memory(tmp_path: Path) -> None:
    """15: solved by the recurrent policy; a memoryless one can only guess."""
    assert right_answers("lstm", tmp_path / "lstm") > 0.97
    assert right_answers("none", tmp_path / "none") < 0.65


def trained(cli: MusterCli, folder: Path, *words: str) -> dict[str, Any]:
    done = cli("train", *words, "--no-tensorboard", "--run-dir", "run", timeout_s=2400)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads((folder / "run" / "training_results.json").read_text())
    return found


@pytest.mark.slow
@pytest.mark.timeout(2600)
def test_cartpole_is_solved(muster_cli: MusterCli, tmp_path: Path) -> None:
    """At least 475 over 100 episodes."""
    found = trained(muster_cli, tmp_path, "ppo", "--devices", "cpu")
    assert found["agent"]["deterministic"]["episodes"] == 100
    assert found["agent"]["deterministic"]["return"]["middle"] >= 475


@pytest.mark.slow
@pytest.mark.timeout(5000)
def test_without_velocities_a_memory_decides(muster_cli: MusterCli, tmp_path: Path) -> None:
    words = ("ppo", "--observe", "0", "2", "--devices", "cpu")
    for memory, folder in (("lstm", tmp_path), ("none", tmp_path)):
        found = trained(muster_cli, folder, *words, "--memory", memory)
        mean = found["agent"]["deterministic"]["return"]["middle"]
        assert (mean >= 475) if memory == "lstm" else (mean < 200), (memory, mean)
        (folder / "run").rename(folder / memory)
