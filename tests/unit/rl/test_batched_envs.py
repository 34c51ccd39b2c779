from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples
from tests.unit.rl.batched_cartpole import MASKED, BatchedCartPole

from muster.base.errors import UsageError
from muster.rl.environment import Outcome, Place

CPU = torch.device("cpu")


def place_of(num_envs: int, seed: int = 0, device: torch.device = CPU) -> Place:
    return Place(num_envs=num_envs, first_env=0, seed=seed, device=device)


def started_at(states: torch.Tensor, max_steps: int = 500) -> BatchedCartPole:
    env = BatchedCartPole(place_of(len(states)), max_steps=max_steps)
    env.reset()
    env.rows = {**env.rows, "state": states.to(torch.float64)}
    return env


def gymnasium_at(state: torch.Tensor) -> gymnasium.Env[np.ndarray, int]:
    env = gymnasium.make("CartPole-v1")
    env.reset(seed=0)
    env.unwrapped.state = state.double().numpy()  # type: ignore[attr-defined]
    return env


def balancing(observation: torch.Tensor) -> torch.Tensor:
    """Keeps the pole up for as long as one likes: pushes to where it falls."""
    return (observation @ torch.tensor([0.05, 0.2, 1.0, 0.6]) > 0).long()


def test_500_steps_are_those_of_gymnasiums_cartpole() -> None:
    """From the same start, with the same actions, up to and including the time limit."""
    start = torch.tensor([0.03, -0.02, 0.04, 0.01])
    ours, theirs = started_at(start[None]), gymnasium_at(start)
    seen = ours.observe()["observation"]
    for step in range(1, 501):
        action = balancing(seen)
        outcome = ours.step(action)
        observation, reward, terminated, truncated, _ = theirs.step(int(action))
        assert outcome.final["observation"][0].tolist() == pytest.approx(
            observation.tolist(), abs=1e-6
        )
        assert float(outcome.reward) == reward
        assert bool(outcome.terminated) is terminated is False
        assert bool(outcome.truncated) is truncated is (step == 500)
        seen = outcome.observation["observation"]
    assert outcome.extras["steps"].tolist() == [500]


@examples(25)
@given(
    start=st.lists(st.floats(-0.2, 0.2), min_size=4, max_size=4).map(torch.tensor),
    actions=st.lists(st.integers(0, 1), min_size=60, max_size=60),
)
def test_falls_are_those_of_gymnasiums_cartpole(start: torch.Tensor, actions: list[int]) -> None:
    ours, theirs = started_at(start[None]), gymnasium_at(start)
    for action in actions:
        outcome = ours.step(torch.tensor([action]))
        observation, _, terminated, _, _ = theirs.step(action)
        assert outcome.final["observation"][0].tolist() == pytest.approx(
            observation.tolist(), abs=1e-6
        )
        assert bool(outcome.terminated) is terminated
        if terminated:
            break


def test_hiding_velocities_leaves_the_dynamics_alone() -> None:
    whole, masked = BatchedCartPole(place_of(5)), BatchedCartPole(place_of(5), observe=MASKED)
    seen, part = whole.reset()["observation"], masked.reset()["observation"]
    for _ in range(30):
        assert part.shape == (5, 2)
        assert torch.equal(seen[:, [0, 2]], part)
        action = (seen[:, 2] > 0).long()
        seen = whole.step(action).observation["observation"]
        part = masked.step(action).observation["observation"]


def test_starts_are_uniform_and_differ_between_episodes() -> None:
    """4,000 starts: mean 0 and variance 0.1^2 / 12 within 5 standard errors."""
    env = BatchedCartPole(place_of(1000))
    first, second = env.reset()["observation"], env.reset()["observation"]
    assert not torch.equal(first, second)
    for values in (first.double(), second.double()):
        assert values.abs().max() < 0.05
        variance = 0.1**2 / 12
        assert abs(values.mean()) < 5 * (variance / 4000) ** 0.5
        # The fourth central moment of a uniform variable is width^4 / 80.
        error = ((0.1**4 / 80 - variance**2) / 4000) ** 0.5
        assert abs(values.var() - variance) < 5 * error


def falling(max_steps: int) -> list[Outcome]:
    env = BatchedCartPole(place_of(3), max_steps=max_steps)
    env.reset()
    return [env.step(torch.ones(3, dtype=torch.int64)) for _ in range(14)]


def test_terminated_wins_over_truncated() -> None:
    """The limit is set to the very step at which the first row falls."""
    falls = [outcome.terminated[0].item() for outcome in falling(500)].index(True)
    both = falling(falls + 1)[falls]
    assert both.terminated[0]
    assert not both.truncated[0]
    earlier = falling(falls)[falls - 1]
    assert earlier.truncated[0]
    assert not earlier.terminated[0]


def test_rows_keep_their_types_through_resets() -> None:
    env = BatchedCartPole(place_of(3), max_steps=2)
    env.reset()
    types = {name: values.dtype for name, values in env.rows.items()}
    for _ in range(3):
        env.step(torch.zeros(3, dtype=torch.int64))
    assert {name: values.dtype for name, values in env.rows.items()} == types


def test_a_step_never_asks_for_a_value() -> None:
    """On the meta device there are no values: whatever would make the host wait raises."""
    env = BatchedCartPole(place_of(4, device=torch.device("meta")))
    env.reset()
    outcome = env.step(torch.zeros(4, dtype=torch.int64, device="meta"))
    assert outcome.observation["observation"].is_meta
    with pytest.raises(RuntimeError, match="meta"):
        outcome.reward.sum().item()


def test_restoring_other_numbers_of_rows_is_refused() -> None:
    two, three = BatchedCartPole(place_of(2)), BatchedCartPole(place_of(3))
    three.reset()
    with pytest.raises(UsageError) as caught:
        two.restore(three.state())
    assert str(caught.value) == (
        "batched CartPole: the state is of 3 environments, and there are 2."
    )
