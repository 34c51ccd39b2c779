"""The objective of PPO against a loop written from the paper."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples
from torch import Tensor

from muster import UsageError
from muster.rl.losses import (
    advantage_sums,
    normalise_advantages,
    ppo_terms,
    squared_deviations,
    total,
)

NAMES = ("log_probs", "entropies", "values", "old_log_probs", "old_values", "advantages", "targets")


@st.composite
def batches(draw: st.DrawFn) -> dict[str, Tensor]:
    shape = draw(st.sampled_from([(1, 1), (3, 2), (6,), (2, 3, 2)]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    valid = torch.rand(shape, generator=generator) < draw(st.sampled_from([0.0, 0.6, 1.0]))
    batch = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) * 0.5 for name in NAMES
    }
    # Nobody may look at invalid steps, nor send gradients through them.
    batch = {
        name: torch.where(valid, values, torch.tensor(math.nan, dtype=torch.float64))
        for name, values in batch.items()
    }
    return {**batch, "valid": valid}


def slow_loss(batch: dict[str, Tensor], clip: float, value_clip: float | None) -> dict[str, float]:
    """Equations 7 and 9 of the paper, one step at a time."""
    sums = dict.fromkeys(("policy", "value", "entropy", "approx_kl", "clipped", "num_valid"), 0.0)
    rows = zip(*(batch[name].flatten().tolist() for name in (*NAMES, "valid")), strict=True)
    for new, entropy, value, old, old_value, advantage, target, valid in rows:
        if not valid:
            continue
        ratio = math.exp(new) / math.exp(old)
        clipped_ratio = min(max(ratio, 1 - clip), 1 + clip)
        sums["policy"] -= min(ratio * advantage, clipped_ratio * advantage)
        error = (value - target) ** 2
        if value_clip is not None:
            near = min(max(value, old_value - value_clip), old_value + value_clip)
            error = max(error, (near - target) ** 2)
        sums["value"] += error
        sums["entropy"] += entropy
        sums["approx_kl"] += ratio - 1 - math.log(ratio)
        sums["clipped"] += ratio < 1 - clip or ratio > 1 + clip
        sums["num_valid"] += 1
    return sums


@examples(100)
@given(
    batch=batches(), clip=st.sampled_from([0.1, 0.3]), value_clip=st.sampled_from([None, 0.05, 0.5])
)
def test_every_term_is_the_papers(
    batch: dict[str, Tensor], clip: float, value_clip: float | None
) -> None:
    terms = ppo_terms(**batch, clip=clip, value_clip=value_clip)
    expected = slow_loss(batch, clip, value_clip)
    for name, value in expected.items():
        assert float(getattr(terms, name)) == pytest.approx(value, abs=1e-12), name
    loss = total(terms, value_coef=0.5, entropy_coef=0.01, count=7.0)
    combined = expected["policy"] + 0.5 * expected["value"] - 0.01 * expected["entropy"]
    assert float(loss) == pytest.approx(combined / 7, abs=1e-12)


@examples(30)
@given(batch=batches(), value_clip=st.sampled_from([None, 0.1]))
def test_gradients_are_those_of_the_slow_loss(
    batch: dict[str, Tensor], value_clip: float | None
) -> None:
    trained = ("log_probs", "entropies", "values")
    leaves = {name: batch[name].clone().requires_grad_() for name in trained}
    terms = ppo_terms(**{**batch, **leaves}, clip=0.2, value_clip=value_clip)
    total(terms, value_coef=0.5, entropy_coef=0.1, count=float(terms.num_valid)).backward()
    count = max(1, int(batch["valid"].sum()))
    step = 1e-6
    for name in trained:
        grad = leaves[name].grad
        assert grad is not None
        for place in range(grad.numel()):
            if not batch["valid"].flatten()[place]:
                assert grad.flatten()[place] == 0
                continue
            nudged = []
            for sign in (1, -1):
                moved = batch[name].clone()
                moved.view(-1)[place] += sign * step
                sums = slow_loss({**batch, name: moved}, 0.2, value_clip)
                nudged.append(sums["policy"] + 0.5 * sums["value"] - 0.1 * sums["entropy"])
            slope = (nudged[0] - nudged[1]) / (2 * step) / count
            assert float(grad.flatten()[place]) == pytest.approx(slope, abs=1e-5)


def test_the_clip_holds_only_what_would_gain_from_moving_on() -> None:
    # Figure 1 of the paper: (ratio, advantage) and the gradient of the loss to log r.
    cases = [
        (1.5, 1.0, 0.0),
        (0.5, -1.0, 0.0),
        (0.5, 1.0, -0.5),
        (1.5, -1.0, 1.5),
        (1.0, 2.0, -2.0),
    ]
    for ratio, advantage, slope in cases:
        log_probs = torch.tensor([math.log(ratio)], requires_grad=True)
        zero = torch.zeros(1)
        terms = ppo_terms(
            log_probs=log_probs, entropies=zero, values=zero, old_log_probs=zero, old_values=zero,
            advantages=torch.tensor([advantage]), targets=zero,
            valid=torch.tensor([True]), clip=0.2,
        )  # fmt: skip
        (grad,) = torch.autograd.grad(terms.policy, log_probs)
        assert float(grad) == pytest.approx(slope)


@examples(30)
@given(batch=batches(), parts=st.integers(1, 3))
def test_parts_with_the_global_count_add_up_to_the_whole(
    batch: dict[str, Tensor], parts: int
) -> None:
    def loss(some: dict[str, Tensor], count: float) -> float:
        terms = ppo_terms(**some, clip=0.2)
        return float(total(terms, value_coef=0.5, entropy_coef=0.01, count=count))

    count = float(batch["valid"].sum())
    flat = {name: values.flatten() for name, values in batch.items()}
    pieces = zip(*(values.chunk(parts) for values in flat.values()), strict=True)
    whole = loss(batch, count)
    assert sum(
        loss(dict(zip(flat, piece, strict=True)), count) for piece in pieces
    ) == pytest.approx(whole, abs=1e-12)


def test_no_valid_step_at_all_is_a_loss_of_zero() -> None:
    zeros: dict[str, Any] = {name: torch.zeros(2, 2) for name in NAMES}
    terms = ppo_terms(**zeros, valid=torch.zeros(2, 2, dtype=torch.bool), clip=0.2)
    assert float(total(terms, value_coef=1.0, entropy_coef=1.0, count=0.0)) == 0


@pytest.mark.parametrize("odd", [*NAMES, "valid"])
def test_shapes_that_would_broadcast_are_refused(odd: str) -> None:
    batch: dict[str, Any] = {name: torch.zeros(3, 2) for name in NAMES}
    batch["valid"] = torch.ones(3, 2, dtype=torch.bool)
    batch[odd] = batch[odd].reshape(6, 1)
    with pytest.raises(UsageError) as caught:
        ppo_terms(**batch, clip=0.2)
    text = str(caught.value)
    assert f"{odd} [6, 1]" in text
    assert text.startswith("Tensors of one minibatch have different shapes, which would broadcast:")
    assert "[3, 2]" in text
    assert "Hint: one number per step and environment each: [steps, environments]." in text


@examples(60)
@given(
    split=st.lists(st.integers(0, 6), min_size=1, max_size=4),
    scale=st.sampled_from([1e-3, 1.0, 1e3]),
    offset=st.sampled_from([0.0, 50.0]),
    share=st.sampled_from([0.5, 1.0]),
    seed=st.integers(0, 2**31),
)
def test_advantages_are_normalised_over_all_ranks(
    split: list[int], scale: float, offset: float, share: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    ranks = []
    for size in split:
        advantages = torch.randn(size, 2, generator=generator, dtype=torch.float64) * scale + offset
        ranks.append((advantages, torch.rand(size, 2, generator=generator) < share))
    sums = torch.stack([advantage_sums(*rank) for rank in ranks]).sum(0)
    squares = torch.stack([squared_deviations(*rank, sums) for rank in ranks]).sum()
    known = np.concatenate([advantages[valid].numpy() for advantages, valid in ranks])
    for advantages, valid in ranks:
        got = normalise_advantages(advantages, valid, sums, squares)
        assert (got[~valid] == 0).all()
        if len(known) > 1:
            expected = (advantages[valid].numpy() - known.mean()) / (known.std(ddof=1) + 1e-8)
            np.testing.assert_allclose(got[valid].numpy(), expected, rtol=1e-6, atol=1e-6)
        else:
            assert (got == 0).all()


def normalised_alone(advantages: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """On one rank."""
    sums = advantage_sums(advantages, valid)
    squares = squared_deviations(advantages, valid, sums)
    return normalise_advantages(advantages, valid, sums, squares)


@pytest.mark.parametrize("value", [0.1, -3e5, 0.0])
def test_advantages_that_are_all_the_same_become_zero(value: float) -> None:
    advantages = torch.full((50, 3), value)
    valid = torch.ones(50, 3, dtype=torch.bool)
    got = normalised_alone(advantages, valid)
    torch.testing.assert_close(got, torch.zeros(50, 3), rtol=0, atol=1e-6)


def test_invalid_advantages_may_be_anything() -> None:
    advantages = torch.tensor([[1.0], [math.nan], [3.0]])
    valid = torch.tensor([[True], [False], [True]])
    got = normalised_alone(advantages, valid)
    assert got.flatten().tolist() == pytest.approx([-(0.5**0.5), 0, 0.5**0.5])
    with pytest.raises(UsageError, match="advantages"):
        normalised_alone(advantages, valid.squeeze(-1))
