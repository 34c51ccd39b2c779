"""Advantages and returns against loops written from the definitions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples
from torch import Tensor

from muster.rl.losses import (
    discounted_running,
    explained_variance,
    explained_variance_sums,
    gae,
)

Rollout = dict[str, Tensor]


@st.composite
def rollouts(draw: st.DrawFn) -> Rollout:
    shape = draw(st.tuples(st.integers(1, 10), st.integers(1, 3)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def floats(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    def bools(share: float) -> Tensor:
        return torch.rand(*shape, generator=generator) < share

    share = draw(st.sampled_from([0.0, 0.2, 0.6, 1.0]))
    valid = ~bools(draw(st.sampled_from([0.0, 0.3, 0.9, 1.0])))
    # Both at once may happen: terminated wins. An invalid step ends nothing.
    terminated, truncated = bools(share) & valid, bools(share) & valid
    nothing = torch.tensor(torch.nan, dtype=torch.float64)
    return {
        "rewards": torch.where(valid, floats(*shape), nothing),
        "values": torch.where(valid, floats(*shape), nothing),
        "bootstrap": torch.where(truncated, floats(*shape), nothing),
        "last_value": floats(shape[1]),
        "terminated": terminated,
        "truncated": truncated,
        "valid": valid,
    }


def episodes(rollout: Rollout, env: int) -> list[tuple[list[int], float]]:
    """Valid steps of each (part of an) episode, and the value of what follows it."""
    found: list[tuple[list[int], float]] = []
    steps: list[int] = []
    for step in torch.nonzero(rollout["valid"][:, env]).flatten().tolist():
        steps.append(step)
        if rollout["terminated"][step, env]:
            found.append((steps, 0.0))
            steps = []
        elif rollout["truncated"][step, env]:
            found.append((steps, float(rollout["bootstrap"][step, env])))
            steps = []
    if steps:
        found.append((steps, float(rollout["last_value"][env])))
    return found


def slow_advantages(rollout: Rollout, gamma: float, lambda_: float) -> np.ndarray:
    """The paper's definition: a sum over k of (gamma lambda)^k delta_(t+k), no recursion."""
    rewards, values = rollout["rewards"].numpy(), rollout["values"].numpy()
    advantages = np.zeros(rewards.shape)
    for env in range(rewards.shape[1]):
        for steps, following in episodes(rollout, env):
            worth = [values[step, env] for step in steps] + [following]
            for start in range(len(steps)):
                for later in range(start, len(steps)):
                    delta = rewards[steps[later], env] + gamma * worth[later + 1] - worth[later]
                    advantages[steps[start], env] += (gamma * lambda_) ** (later - start) * delta
    return advantages


@examples(150)
@given(
    rollout=rollouts(),
    gamma=st.sampled_from([0.0, 0.9, 0.99, 1.0]),
    lambda_=st.sampled_from([0.0, 0.95, 1.0]),
)
def test_gae_is_the_papers_sum(rollout: Rollout, gamma: float, lambda_: float) -> None:
    # What is not to be read is NaN, so that reading it shows.
    advantages, targets = gae(**rollout, gamma=gamma, gae_lambda=lambda_)
    expected = slow_advantages(rollout, gamma, lambda_)
    np.testing.assert_allclose(advantages.numpy(), expected, atol=1e-12)
    valid = rollout["valid"]
    np.testing.assert_allclose(
        targets[valid].numpy(), expected[valid.numpy()] + rollout["values"][valid].numpy(),
        atol=1e-12,
    )  # fmt: skip
    assert (targets[~valid] == 0).all()


def one_env(**given_: list[float] | list[bool] | float) -> Rollout:
    """Four steps of one environment; value 10 everywhere, bootstrap 100, last value 1000."""
    rollout: Rollout = {
        "rewards": torch.tensor([1.0, 2.0, 4.0, 8.0]).unsqueeze(1),
        "values": torch.full((4, 1), 10.0),
        "bootstrap": torch.full((4, 1), 100.0),
        "last_value": torch.tensor([1000.0]),
        "terminated": torch.zeros(4, 1, dtype=torch.bool),
        "truncated": torch.zeros(4, 1, dtype=torch.bool),
        "valid": torch.ones(4, 1, dtype=torch.bool),
    }
    rollout.update({name: torch.tensor(what).unsqueeze(1) for name, what in given_.items()})
    return rollout


NO, YES = False, True


@pytest.mark.parametrize(
    ("flags", "returns"),
    [
        ({}, [1015.0, 1014.0, 1012.0, 1008.0]),
        ({"terminated": [NO, YES, NO, NO]}, [3.0, 2.0, 1012.0, 1008.0]),
        ({"truncated": [NO, YES, NO, NO]}, [103.0, 102.0, 1012.0, 1008.0]),
        ({"terminated": [NO, NO, NO, YES]}, [15.0, 14.0, 12.0, 8.0]),
        ({"truncated": [NO, NO, NO, YES]}, [115.0, 114.0, 112.0, 108.0]),
        ({"truncated": [YES] * 4, "terminated": [YES] * 4}, [1.0, 2.0, 4.0, 8.0]),
        (
            {"truncated": [NO, YES, NO, NO], "valid": [YES, YES, NO, YES]},
            [103.0, 102.0, 0.0, 1008.0],
        ),
    ],
)
def test_termination_truncation_and_the_end_of_the_rollout(
    flags: dict[str, list[bool]], returns: list[float]
) -> None:
    # With gamma = lambda = 1 targets are plain sums of rewards and what follows.
    _, targets = gae(**one_env(**flags), gamma=1.0, gae_lambda=1.0)
    assert targets.flatten().tolist() == returns


def test_returns_have_the_values_dtype_and_no_gradient() -> None:
    rollout = one_env()
    rollout["values"].requires_grad_()
    advantages, targets = gae(**rollout, gamma=0.9, gae_lambda=0.9)
    assert advantages.dtype == targets.dtype == torch.float32
    assert not advantages.requires_grad
    assert not targets.requires_grad


@examples(60)
@given(rollout=rollouts(), cut=st.integers(0, 10), gamma=st.sampled_from([0.0, 0.9, 1.0]))
def test_discounted_returns_so_far(rollout: Rollout, cut: int, gamma: float) -> None:
    rewards, valid = rollout["rewards"], rollout["valid"]
    ended = rollout["terminated"] | rollout["truncated"]
    carry = torch.zeros(rewards.shape[1], dtype=torch.float64)
    # Two rollouts one after the other are one long one.
    first, carry = discounted_running(rewards[:cut], carry, ended[:cut], valid[:cut], gamma=gamma)
    second, _ = discounted_running(rewards[cut:], carry, ended[cut:], valid[cut:], gamma=gamma)
    running = torch.cat([first, second])
    for env in range(rewards.shape[1]):
        for steps, _ in episodes(rollout, env):
            earned = [float(rewards[step, env]) for step in steps]
            for place, step in enumerate(steps):
                expected = sum(gamma ** (place - j) * earned[j] for j in range(place + 1))
                assert float(running[step, env]) == pytest.approx(expected, abs=1e-12)


@examples(60)
@given(rollout=rollouts(), parts=st.integers(1, 3))
def test_explained_variance_of_any_split_is_numpys(rollout: Rollout, parts: int) -> None:
    values, valid = rollout["values"], rollout["valid"]
    targets = values + torch.randn(
        values.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    sums = [
        explained_variance_sums(v, t, ok)
        for v, t, ok in zip(
            values.chunk(parts), targets.chunk(parts), valid.chunk(parts), strict=True
        )
    ]
    got = float(explained_variance(torch.stack(sums).sum(0)))
    known = targets[valid].numpy()
    if len(known) < 2:
        assert np.isnan(got)
        return
    expected = 1 - np.var(known - values[valid].numpy()) / np.var(known)
    assert got == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_explained_variance_at_its_marks() -> None:
    targets, valid = torch.arange(6.0).view(3, 2), torch.ones(3, 2, dtype=torch.bool)
    cases = [(targets, 1.0), (torch.full_like(targets, 7.0), 0.0), (targets + 5, 1.0)]
    for values, expected in cases:
        assert (
            float(explained_variance(explained_variance_sums(values, targets, valid))) == expected
        )
    constant = torch.full_like(targets, 0.1)
    assert explained_variance(explained_variance_sums(targets, constant, valid)).isnan()
