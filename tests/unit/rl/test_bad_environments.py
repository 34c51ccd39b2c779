"""Environments that are not what they say end a training with a sentence, wherever they do it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import pytest
import torch
from tests.unit.rl.batched_cartpole import BatchedCartPole
from tests.unit.rl.toy_agents import CartPoleAgent
from torch import Tensor

from muster.base.errors import TargetError
from muster.rl.config import PpoConfig
from muster.rl.environment import (
    ACTION_MASK,
    BatchedEnv,
    Change,
    Discrete,
    Entry,
    EnvSpec,
    Observation,
    Outcome,
    Place,
    Split,
    VectorEnv,
    check_observation,
)
from muster.rl.loop import train_agent
from muster.rl.policy import Policy, RecurrentPolicy
from muster.rl.rollout import Finals
from muster.run.folder import RunFolder

ROWS, STEPS = 4, 12
SPEC = EnvSpec(name="e", num_envs=2, observation={"observation": Entry((4,))}, actions=Discrete(2))
Spoil = Callable[[Outcome], Outcome]


class Spoiled(BatchedCartPole):
    """Right until step ``at``, whose outcome is spoiled; so are all after it."""

    def __init__(self, place: Place, spoil: Spoil, at: int) -> None:
        super().__init__(place, max_steps=20)
        self._spoil, self._left = spoil, at

    def step(self, actions: Tensor) -> Outcome:
        self._left -= 1
        outcome = super().step(actions)
        return self._spoil(outcome) if self._left < 0 else outcome


@dataclass
class SpoiledAgent(CartPoleAgent):
    """``only``: the split whose environments are spoiled; all where it is empty."""

    spoil: Spoil = lambda outcome: outcome
    at: int = 0
    only: str = ""

    def environments(self, split: Split, place: Place) -> VectorEnv:
        is_spoiled = self.only in ("", split)
        return Spoiled(place, self.spoil if is_spoiled else lambda outcome: outcome, self.at)

    def policy(self, spec: EnvSpec) -> Policy:
        return RecurrentPolicy(spec, hidden=8, layers=(8,), memory="none")


def error_of(folder: Path, task: CartPoleAgent) -> str:
    place = RunFolder(folder)
    place.create()
    config = PpoConfig(
        num_envs=ROWS, batch_size=2, rollout_steps=STEPS, update_epochs=1, num_steps=ROWS * STEPS,
        eval_episodes=1, eval_frequency=0, tensorboard=False,
    )  # fmt: skip
    with pytest.raises(TargetError) as caught:
        train_agent(task, config, place, None, lambda line: None, checkpoint_s=None)
    return str(caught.value)


def seen(change: Callable[[Tensor], Any]) -> Spoil:
    return lambda outcome: outcome._replace(
        observation={"observation": change(outcome.observation["observation"])}
    )


CASES: list[tuple[Spoil, str]] = [
    # torch would repeat the one row for all environments.
    (seen(lambda v: v[:1]), "give a tensor of shape (1, 4) of float32 for the observation 'obs"),
    (
        seen(lambda v: v.double()),
        "(4, 4) of float64 for the observation 'observation' (step)",
    ),
    (seen(lambda v: v.long()), "their spec says (4, 4) of float32: environments first."),
    (seen(lambda v: v.numpy()), "give a value of ndarray for the observation"),
    (lambda o: o._replace(observation={}), "nothing for the observation 'observation' (step)"),
    (
        lambda o: o._replace(observation=o.reward),
        "as an observation (step), which has to be a",
    ),
    (
        lambda o: o._replace(final={}, truncated=torch.ones_like(o.truncated)),
        "give nothing for the observation 'observation' (step, final)",
    ),
    (lambda o: o._replace(reward=o.reward[:, None]), "shape (4, 1) of float32 for the reward of a"),
    (lambda o: o._replace(reward=o.reward + 0j), "of complex64 for the reward of a step"),
    (lambda o: o._replace(reward=1.0), "give a value of float for the reward of a step"),
    (lambda o: o._replace(truncated=o.truncated.float()), "of float32 for the truncated of a step"),
    (lambda o: o._replace(starts=o.starts[:2]), "shape (2,) of bool for the starts of a step"),
    (lambda o: o._replace(extras={}), "give nothing for the extra 'steps' of a step"),
]


def metrics_of(folder: Path, spoil: Spoil) -> dict[str, Any]:
    """What the one update of a training has reported, but for times."""
    place = RunFolder(folder)
    place.create()
    config = PpoConfig(
        num_envs=ROWS, batch_size=2, rollout_steps=STEPS, update_epochs=1, num_steps=ROWS * STEPS,
        eval_episodes=1, eval_frequency=0, tensorboard=False,
    )  # fmt: skip
    train_agent(
        SpoiledAgent(spoil=spoil), config, place, None, lambda line: None, checkpoint_s=None
    )
    lines = map(json.loads, place.metrics.read_text().splitlines())
    values = next(line for line in lines if line["kind"] == "update")
    return {name: values[name] for name in ("policy_loss", "value_loss", "kl", "grad_norm")}


ALLOWED: list[Spoil] = [
    lambda o: o._replace(reward=o.reward.long()),
    lambda o: o._replace(reward=o.reward.to(torch.uint8)),
    lambda o: o._replace(reward=o.reward > 0),  # a step of CartPole earns 1
    lambda o: o._replace(final=o.final if bool((o.terminated | o.truncated).any()) else {}),
]


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return metrics_of(tmp_path_factory.mktemp("usual"), lambda outcome: outcome)


@pytest.mark.parametrize("spoil", ALLOWED)
def test_what_means_the_same_is_learnt_from_alike(
    spoil: Spoil, usual: dict[str, Any], tmp_path: Path
) -> None:
    assert metrics_of(tmp_path / "run", spoil) == usual


def test_another_type_of_numbers_is_told_with_both_remedies() -> None:
    with pytest.raises(TargetError) as caught:
        check_observation("They", SPEC, {"observation": torch.zeros(2, 4, dtype=torch.float64)})
    assert str(caught.value).endswith(
        "Hint: write Entry((4,), torch.float64) in the spec, or give values.to(torch.float32)."
    )


@pytest.mark.parametrize("waits", [True, False])
def test_an_end_without_its_final_observation_is_told(waits: bool) -> None:
    """Whether the host knows of the end at once (on a CPU) or looks once (on a GPU)."""
    finals = Finals(SPEC, 3, torch.zeros(2, dtype=torch.bool), waits=waits)
    never, one = torch.tensor([False, False]), torch.tensor([False, True])
    finals.keep(0, never, {}, {})
    finals.keep(1, one, {"observation": torch.zeros(2, 4)}, {})
    assert len(finals._gathered()[0]) == 1
    with pytest.raises(TargetError, match=r"nothing for the observation .* \(step, final\)"):
        finals.keep(2, one, {}, {})
        finals._gathered()


@pytest.mark.parametrize(("spoil", "message"), CASES)
def test_a_wrong_outcome_of_the_first_step_is_told(
    spoil: Spoil, message: str, tmp_path: Path
) -> None:
    told = error_of(tmp_path, SpoiledAgent(spoil=spoil, only="train"))
    assert message in told
    assert told.startswith("The environments 'batched CartPole' give ")


def test_the_rehearsal_finds_it_before_anything_is_begun(tmp_path: Path) -> None:
    told = error_of(tmp_path, SpoiledAgent(spoil=CASES[1][0], only="val"))
    assert "give a tensor of shape (1, 4) of float64 for the observation 'observation' (st" in told
    assert not RunFolder(tmp_path).metrics.exists()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            CASES[7][0],
            "gave a tensor of shape (4,) of float32 for 'rewards' at first and now",
        ),
        (CASES[10][0], "gave a tensor of shape (4,) of bool for 'truncated' at first and now"),
        (
            lambda o: o._replace(observation={}),
            "shape (4, 4) of float32 for 'observation' at first and now give nothing",
        ),
    ],
)
def test_a_step_that_differs_from_the_first_one_is_told(
    spoil: Spoil, message: str, tmp_path: Path
) -> None:
    assert message in error_of(tmp_path, SpoiledAgent(spoil=spoil, at=5, only="train"))


class OddSpec(BatchedCartPole):
    def __init__(self, place: Place, **changed: Any) -> None:
        super().__init__(place, max_steps=20)
        self._spec = dataclasses.replace(self._spec, **changed)


@dataclass
class OddSpecAgent(SpoiledAgent):
    changed: dict[str, Any] = dataclasses.field(default_factory=dict)

    def environments(self, split: Split, place: Place) -> VectorEnv:
        return OddSpec(place, **self.changed)


def test_a_spec_that_cannot_be_learnt_is_told(tmp_path: Path) -> None:
    told = error_of(tmp_path / "a", OddSpecAgent(changed={"actions": gymnasium.spaces.Discrete(2)}))
    assert told.startswith(
        "The environments of OddSpecAgent have the actions Discrete(2), which are neither muster."
    )
    told = error_of(tmp_path / "b", OddSpecAgent(changed={"num_envs": 3}))
    assert "are 3 by their spec, and 4 were asked for." in told


class Columns(BatchedEnv):
    """Its flags are a column, which would make a table of the episodes' numbers."""

    def __init__(self, place: Place) -> None:
        entries = {"observation": Entry((1,))}
        super().__init__(
            EnvSpec(name="c", num_envs=place.num_envs, observation=entries, actions=Discrete(2)),
            place,
        )

    def fresh(self) -> dict[str, Tensor]:
        return {"x": torch.zeros(self.place.num_envs, 1)}

    def observe(self) -> Observation:
        return {"observation": self.rows["x"]}

    def advance(self, actions: Tensor) -> Change:
        is_over = self.rows["x"] > 0
        return Change(self.rows["x"].squeeze(1), is_over, torch.zeros_like(is_over), {})


@dataclass
class ColumnsAgent(SpoiledAgent):
    def environments(self, split: Split, place: Place) -> VectorEnv:
        return Columns(place)


def test_flags_in_a_column_are_told(tmp_path: Path) -> None:
    told = error_of(tmp_path, ColumnsAgent())
    assert "'c' give a tensor of shape (1, 1) of bool for the terminated of a step" in told


class Shut(BatchedCartPole):
    """Allows nothing in environment 1 from the third step of an episode on."""

    def __init__(self, place: Place) -> None:
        super().__init__(place, max_steps=20)
        entries = {**self._spec.observation, ACTION_MASK: Entry((2,), torch.bool)}
        self._spec = dataclasses.replace(self._spec, observation=entries)

    def observe(self) -> Observation:
        is_open = (self.rows["steps"] < 3) | (self.index != 1)
        return {**super().observe(), ACTION_MASK: is_open[:, None].expand(-1, 2)}


@dataclass
class ShutAgent(SpoiledAgent):
    def environments(self, split: Split, place: Place) -> VectorEnv:
        return Shut(place)


def test_a_mask_that_allows_nothing_is_told(tmp_path: Path) -> None:
    told = error_of(tmp_path, ShutAgent())
    assert "gave an action_mask that allows nothing, in environment 1 of this rank at" in told
