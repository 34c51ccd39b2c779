"""What an agent's task is asked at evaluations and at the end is asked once before the start."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy
import pytest
import torch
from tests.unit.rl.toy_agents import CartPoleAgent, Wide
from tests.unit.train.rank_jobs import last_weights

from muster.base.errors import UsageError
from muster.rl.config import PpoConfig
from muster.rl.environment import Entry, EnvSpec, Place, Split, VectorEnv
from muster.rl.loop import train_agent
from muster.rl.policy import Policy
from muster.run.folder import RunFolder


@dataclass
class NoTestData(CartPoleAgent):
    def environments(self, split: Split, place: Place) -> VectorEnv:
        if split == "test":
            raise FileNotFoundError("test.parquet")
        return super().environments(split, place)


@dataclass
class TypoInFinish(CartPoleAgent):
    def finish(
        self, policy: Policy, device: torch.device, seed: int, folder: Path
    ) -> dict[str, Any]:
        return {"name": polcy.name}  # type: ignore[name-defined]  # noqa: F821


@dataclass
class ListFromFinish(CartPoleAgent):
    def finish(  # type: ignore[override]
        self, policy: Policy, device: torch.device, seed: int, folder: Path
    ) -> list[str]:
        return ["done"]


@dataclass
class TensorFromFinish(CartPoleAgent):
    def finish(
        self, policy: Policy, device: torch.device, seed: int, folder: Path
    ) -> Mapping[str, Any]:
        return {"weights": next(policy.parameters())}


@dataclass
class OnlyDraws(CartPoleAgent):
    def finish(  # type: ignore[override]
        self, policy: Policy, device: torch.device, seed: int, folder: Path
    ) -> None:
        (folder / "drawn.txt").write_text("yes")


@dataclass
class WrongMonitor(CartPoleAgent):
    monitor: ClassVar[str] = "retrun"


@dataclass
class NoEnvironments(CartPoleAgent):
    def environments(self, split: Split, place: Place) -> VectorEnv:
        return None  # type: ignore[return-value]


@dataclass
class NoPolicy(CartPoleAgent):
    def policy(self, spec: EnvSpec) -> Policy:
        return None  # type: ignore[return-value]


class Taller(Wide):
    @property
    def spec(self) -> EnvSpec:
        spec = super().spec
        entries = {name: Entry((5,)) for name in spec.observation}
        return dataclasses.replace(spec, observation=entries)


@dataclass
class WrongSpec(CartPoleAgent):
    def environments(self, split: Split, place: Place) -> VectorEnv:
        return Taller(place, self.max_steps, self.wide)


@dataclass
class Meddles(CartPoleAgent):
    """While it is rehearsed, it touches all that it can."""

    meddles: bool = False
    counted: int = 0

    def environments(self, split: Split, place: Place) -> VectorEnv:
        self._meddle()
        return super().environments(split, place)

    def finish(
        self, policy: Policy, device: torch.device, seed: int, folder: Path
    ) -> dict[str, Any]:
        self._meddle()
        if self.rehearsing and self.meddles:
            policy.train()
            with torch.no_grad():
                next(policy.parameters()).fill_(3.0)
        (folder / "finished.txt").write_text("yes")
        return {"counted": self.counted}

    def _meddle(self) -> None:
        if self.rehearsing and self.meddles:
            random.random()
            numpy.random.rand()
            torch.rand(3)
            self.counted += 1


def trained(folder: Path, task: CartPoleAgent) -> dict[str, Any]:
    place = RunFolder(folder)
    place.create()
    config = PpoConfig.of(
        task.defaults, num_steps=2 * 24 * 8, eval_episodes=2, eval_frequency=1, tensorboard=False
    )
    results = train_agent(task, config, place, None, lambda line: None, checkpoint_s=None)
    assert results is not None
    return results


def test_a_finish_that_only_draws_gives_nothing(tmp_path: Path) -> None:
    assert trained(tmp_path, OnlyDraws())["agent"] == {}
    assert (RunFolder(tmp_path).figures / "drawn.txt").exists()


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (NoTestData, "NoTestData.environments failed in the rehearsal before the first step: File"),
        (TypoInFinish, "TypoInFinish.finish failed in the rehearsal before the first step: NameE"),
        (ListFromFinish, "ListFromFinish.finish returns a list."),
        (TensorFromFinish, "TensorFromFinish.finish gives something that the results cannot hold"),
        (WrongMonitor, "did you mean 'return'?"),
        (NoEnvironments, "NoEnvironments.environments gave NoneType for 'train'"),
        (NoPolicy, "NoPolicy.policy gave NoneType, not Policy."),
        (WrongSpec, "and their spec says (8, 5) of float32: environments first."),
    ],
)
def test_a_mistake_ends_before_the_first_step(
    task: type[CartPoleAgent], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as caught:
        trained(tmp_path, task())
    assert message in str(caught.value)
    assert not RunFolder(tmp_path).metrics.exists()
    if "failed in the rehearsal" in message:
        assert "test_agent_rehearsal.py:" in str(caught.value)


def test_a_rehearsal_leaves_no_trace_in_the_run(tmp_path: Path) -> None:
    """Bit for bit the run whose methods touch nothing while they are rehearsed."""
    found = {}
    for meddles in (False, True):
        folder = tmp_path / str(meddles)
        results = trained(folder, Meddles(meddles=meddles))
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        kept = [
            {k: v for k, v in line.items() if k not in ("seconds", "steps_per_s")
             and not k.endswith("_share")}
            for line in lines
        ]  # fmt: skip
        files = sorted(str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file())
        found[meddles] = kept, results["metrics"], results["agent"], files
        found[str(meddles)] = last_weights(RunFolder(folder))
    assert found[True] == found[False]
    assert "figures/finished.txt" in found[True][3]
    for name, value in found["False"].items():
        assert torch.equal(found["True"][name], value), name
