"""The recipe ``ppo``: its flags, what it makes of them, and its final numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from muster import UsageError
from muster.rl.config import PpoConfig
from muster.rl.environment import Continuous, Discrete, Observation, Place
from muster.rl.policy import PolicyOutput, RecurrentPolicy, State
from muster_recipes.ppo.config import AGENT, PpoRecipeConfig, parse_env_kwargs
from muster_recipes.ppo.task import PpoTask

CPU = torch.device("cpu")


def place(num_envs: int) -> Place:
    return Place(num_envs=num_envs, first_env=0, seed=3, device=CPU)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{'a': 1}", r"--env-kwargs \"\{'a': 1\}\" is not JSON: .* at column 2"),
        ("", "is not JSON"),
        ("[1, 2]", "must be a JSON object of arguments by name, not list"),
        ("3", "not int"),
    ],
)
def test_arguments_that_are_no_json_object(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=rf"(?s){message}.*Hint: .*--env-kwargs '"):
        PpoRecipeConfig(env_kwargs=text)


def test_arguments_by_name() -> None:
    assert parse_env_kwargs('{"continuous": true, "x": [1, null]}') == {
        "continuous": True,
        "x": [1, None],
    }


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hidden": 0}, "--hidden must be greater than 0, not 0"),
        ({"observe": ()}, "--observe names no component"),
        ({"observe": (0, -1)}, "--observe -1: components count from 0"),
        ({"observe": (2, 0, 2)}, "--observe 2 0 2 names a component twice"),
    ],
)
def test_settings_that_cannot_be_meant(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        PpoRecipeConfig(**settings)  # type: ignore[arg-type]


def test_the_defaults_are_settings_of_the_training() -> None:
    config = PpoConfig.of(AGENT.defaults)
    assert config.num_steps is not None
    assert PpoTask.defaults is AGENT.defaults


def test_observed_components_reach_the_policy() -> None:
    task = PpoTask(PpoRecipeConfig(observe=(0, 2), hidden=8))
    env = task.environments("train", place(2))
    policy = task.policy(env.spec)
    assert isinstance(policy, RecurrentPolicy)
    assert env.reset()["observation"].shape == (2, 2)
    assert env.spec.actions == Discrete(2)
    assert policy.initial_state(2, CPU)["actor_h"].shape == (2, 8)
    env.close()


def test_without_a_memory_there_is_no_state() -> None:
    task = PpoTask(PpoRecipeConfig(memory="none"))
    env = task.environments("train", place(1))
    assert task.policy(env.spec).initial_state(1, CPU) == {}
    env.close()


def test_arguments_reach_the_environment() -> None:
    task = PpoTask(PpoRecipeConfig(env="Pendulum-v1", env_kwargs='{"g": 0.0}', hidden=4))
    env = task.environments("train", place(1))
    assert env.spec.actions == Continuous((-2.0,), (2.0,))
    # Without gravity and torque the pendulum keeps its speed.
    first = env.reset()["observation"]
    after = env.step(torch.zeros(1, 1)).observation["observation"]
    assert float(after[0, 2]) == pytest.approx(float(first[0, 2]), abs=1e-6)
    env.close()


def test_a_native_vector_environment_is_announced_as_not_resumable() -> None:
    assert not PpoTask(PpoRecipeConfig()).remarks()
    (remark,) = PpoTask(PpoRecipeConfig(vectorization="native")).remarks()
    assert "every environment begins a new episode" in remark


class Reflex(RecurrentPolicy):
    """Would rather push CartPole to where the pole falls, but hardly minds."""

    def act(
        self, observation: Observation, state: State, starts: torch.Tensor
    ) -> tuple[PolicyOutput, State]:
        falls_right = (observation["observation"][:, 2] > 0).long()
        logits = torch.nn.functional.one_hot(falls_right, 2) * 0.01
        return PolicyOutput(logits, torch.zeros(len(logits))), state


@pytest.mark.parametrize("vectorization", ["sync", "native"])
def test_the_end_tells_both_kinds_of_acting(vectorization: str, tmp_path: Path) -> None:
    task = PpoTask(PpoRecipeConfig(vectorization=vectorization, hidden=4))  # type: ignore[arg-type]
    env = task.environments("train", place(1))
    policy = Reflex(env.spec, hidden=4)
    env.close()
    result = dict(task.finish(policy, CPU, 1, tmp_path))
    assert result == json.loads(json.dumps(result, allow_nan=False))
    likeliest, sampled = result["deterministic"], result["stochastic"]
    for numbers in (likeliest, sampled):
        assert numbers["episodes"] == numbers["return"]["num"] == 100
        # CartPole pays 1 per step.
        assert numbers["return"] == numbers["length"]
        assert numbers["terminated"] == 100
    # The reflex holds the pole for about 42 steps, random pushes for about 22.
    assert 35 < likeliest["return"]["middle"] < 50
    assert sampled["return"]["high"] < likeliest["return"]["low"]
