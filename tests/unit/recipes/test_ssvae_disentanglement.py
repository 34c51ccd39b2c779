"""The published scores on codes whose scores are known, and the images with known factors."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples
from tests.unit.recipes.ssvae_slow_probe import slow_fit
from torch import Tensor

from muster_recipes.digits.images import embedded_digits
from muster_recipes.ssvae.disentanglement import (
    NAMES,
    beta_vae_score,
    factor_vae_score,
    full_grid,
    moved_images,
    mutual_information_gap,
    transformed,
)

#: Four factors with three values each, every combination eight times.
GRID = torch.cartesian_prod(*[torch.arange(3)] * 4).repeat(8, 1)

#: Some dimensions tell about two factors or three.
MIXTURE = torch.tensor(
    [[1.0, 0.8, 0.0, 0.0], [0.8, 1.0, 0.0, 0.0], [0.0, 0.9, 1.0, 0.9], [0.0, 0.0, 0.9, 1.0]]
)


def _noise(num_dims: int, seed: int = 0) -> Tensor:
    stream = torch.Generator().manual_seed(seed)
    return torch.randn(len(GRID), num_dims, generator=stream)


def _perfect() -> Tensor:
    """A dimension for each factor, in another order and unit, and two that say nothing."""
    units = torch.tensor([1.0, -2.0, 0.5, 3.0])
    told = (GRID[:, [2, 0, 3, 1]].float() - 1) * units + 0.01 * _noise(4)
    return torch.cat([told, 0.001 * _noise(2, 1)], 1)


def _rotated() -> Tensor:
    """Every dimension tells equally much about every factor: a Hadamard matrix of four."""
    two = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    return (GRID.float() - 1) @ torch.kron(two, two) / 2


def _scores(codes: Tensor) -> tuple[list[float], list[float], list[float]]:
    return (
        beta_vae_score(codes, GRID, seed=0, num_train=300, num_test=200).tolist(),
        factor_vae_score(codes, GRID, seed=0, num_train=300, num_test=200).tolist(),
        mutual_information_gap(codes, GRID).tolist(),
    )


def test_perfect_mixed_and_empty_codes() -> None:
    broken = _perfect()
    broken[3, 1] = math.nan
    codes = torch.stack([_perfect(), torch.zeros(len(GRID), 6), broken])
    beta, factor, gap = _scores(codes)
    assert (beta[0], factor[0]) == (1.0, 1.0)
    assert gap[0] == pytest.approx(1.0, abs=0.05)  # idle dimensions seem to tell 0.035 in 648
    assert beta[1] == pytest.approx(1 / 4, abs=0.1)  # its chance level, as published
    assert (factor[1], gap[1]) == (0.0, 0.0)
    assert all(math.isnan(score[2]) for score in (beta, factor, gap))


def test_a_rotation_of_the_perfect_code_scores_low() -> None:
    beta, factor, gap = _scores(_rotated()[None])
    assert beta[0] < 0.45
    assert factor[0] < 0.45
    assert gap[0] < 0.05


def test_two_dimensions_that_say_the_same_have_no_gap() -> None:
    twice = GRID.float().repeat(1, 2)[None]
    assert mutual_information_gap(twice, GRID).tolist() == [0.0]
    assert mutual_information_gap(GRID[:, :1].float()[None], GRID[:, :1]).item() == (
        pytest.approx(1.0)  # one dimension: the gap is to 0
    )


def test_dead_dimensions_do_not_vote() -> None:
    # Whatever is fixed, no dimension varies less than the dead one, which stands first.
    codes = torch.cat([torch.zeros(len(GRID), 1), GRID.float()], 1)[None]
    assert factor_vae_score(codes, GRID, 0, num_train=200, num_test=100).item() == 1.0


def test_a_factor_with_one_value_is_refused() -> None:
    with pytest.raises(ValueError, match="one value only"):
        mutual_information_gap(_perfect()[None], torch.zeros_like(GRID))


def test_runs_do_not_mix() -> None:
    codes = torch.stack([_perfect(), _noise(6, 5), _perfect() + 0.5 * _noise(6, 6)])
    for together, alone in zip(_scores(codes), _scores(codes[1:2]), strict=True):
        assert together[1] == pytest.approx(alone[0], abs=1e-9)


def _slow_gap(codes: list[list[float]], factors: list[list[int]], num_bins: int) -> float:
    """Chen et al. (2018), equation 6, with counters."""
    columns = []
    for column in zip(*codes, strict=True):
        low, high = min(column), max(column)
        width = (high - low) / num_bins
        columns.append([min(int((v - low) / width), num_bins - 1) for v in column])
    gaps = []
    for values in zip(*factors, strict=True):
        entropy = -sum(
            c / len(values) * math.log(c / len(values)) for c in Counter(values).values()
        )
        told = []
        for column in columns:
            joint = Counter(zip(column, values, strict=True))
            bins, levels = Counter(column), Counter(values)
            told.append(
                sum(
                    c / len(values) * math.log(c * len(values) / (bins[b] * levels[v]))
                    for (b, v), c in joint.items()
                )
            )
        second, first = sorted(told)[-2:]
        gaps.append((first - second) / entropy)
    return sum(gaps) / len(gaps)


@given(seed=st.integers(0, 2**16), mix=st.floats(0, 1))
@examples(10)
def test_the_gap_is_that_of_slow_counting(seed: int, mix: float) -> None:
    codes = (GRID.float() + mix * _noise(4, seed)).double()
    slow = _slow_gap(codes.tolist(), GRID.tolist(), 20)
    assert mutual_information_gap(codes[None], GRID).item() == pytest.approx(slow, abs=1e-9)


def _slow_factor_vae(codes: list[list[float]], factors: list[list[int]], num: int) -> float:
    """Kim and Mnih (2018), section 4, with lists and another stream of random numbers."""
    stream = random.Random(0)
    dims, kinds = range(len(codes[0])), range(len(factors[0]))

    def variance(rows: list[list[float]], dim: int) -> float:
        middle = sum(row[dim] for row in rows) / len(rows)
        return sum((row[dim] - middle) ** 2 for row in rows) / (len(rows) - 1)

    total = [variance(codes, dim) for dim in dims]
    by_value = {
        (k, v): [c for c, f in zip(codes, factors, strict=True) if f[k] == v]
        for k in kinds
        for v in range(3)
    }

    def vote() -> tuple[int, int]:
        k = stream.choice(kinds)
        rows = stream.choices(by_value[k, stream.randrange(3)], k=32)
        return min(dims, key=lambda dim: variance(rows, dim) / total[dim]), k

    seen, fresh = Counter(vote() for _ in range(num)), [vote() for _ in range(num)]
    guess = {dim: max(kinds, key=lambda k: seen[dim, k]) for dim in dims}
    return sum(guess[dim] == k for dim, k in fresh) / num


def test_the_factor_vae_score_is_that_of_a_slow_version() -> None:
    mixed = GRID.float() @ MIXTURE
    codes = mixed + 0.5 * _noise(4, 2)
    found = factor_vae_score(codes[None], GRID, 0, num_train=2000, num_test=2000, num_images=32)
    slow = _slow_factor_vae(codes.tolist(), GRID.tolist(), 600)
    assert 0.4 < slow < 0.95  # neither of the trivial ends
    assert found.item() == pytest.approx(slow, abs=0.08)


def _slow_beta_vae(codes: Tensor, factors: list[list[int]], num: int) -> float:
    """Higgins et al. (2017), section 3, vote by vote, with another solver and stream."""
    stream = random.Random(0)
    kinds = range(len(factors[0]))
    by_value = {
        (k, v): [row for row, f in enumerate(factors) if f[k] == v] for k in kinds for v in range(3)
    }
    votes, labels = [], []
    for _ in range(2 * num):
        k = stream.choice(kinds)
        pairs = [stream.choices(by_value[k, stream.randrange(3)], k=2) for _ in range(16)]
        votes.append(sum((codes[a] - codes[b]).abs() for a, b in pairs) / 16)
        labels.append(k)
    inputs, target = torch.stack(votes), torch.tensor(labels)  # type: ignore[arg-type]
    weight = slow_fit(inputs[:num], target[:num], len(kinds))
    scaled = (inputs - inputs[:num].mean(0)) / inputs[:num].std(0, correction=0)
    guess = (torch.cat([scaled, torch.ones(2 * num, 1)], 1) @ weight)[num:].argmax(1)
    return (guess == target[num:]).double().mean().item()


def test_the_beta_vae_score_is_that_of_a_slow_version() -> None:
    codes = (GRID.float() @ MIXTURE + 0.5 * _noise(4, 2)).double()
    found = beta_vae_score(codes[None], GRID, 0, num_train=1000, num_test=2000, num_pairs=16)
    slow = _slow_beta_vae(codes, GRID.tolist(), 600)
    assert 0.4 < slow < 0.95
    assert found.item() == pytest.approx(slow, abs=0.06)


def test_two_factors_in_one_dimension_cost_a_quarter() -> None:
    codes = torch.stack([GRID[:, 0], GRID[:, 1], GRID[:, 2] + GRID[:, 3]], 1).float()
    # Factors 2 and 3 leave the same trace, so that the best guess is right in 3 of 4 votes.
    beta = beta_vae_score(codes[None], GRID, 0, num_train=1500, num_test=2000)
    assert beta.item() == pytest.approx(0.75, abs=0.04)
    assert factor_vae_score(codes[None], GRID, 0).item() == pytest.approx(0.75, abs=0.04)


# Images with known factors


def test_a_movement_is_the_one_that_its_values_say() -> None:
    image = torch.zeros(1, 9, 9)
    image[0, 4, 6] = 1.0  # two pixels to the right of the middle
    pixel = 2 / 9  # in half widths
    cases = {
        (0.0, 1.0, 0.0, 0.0): (4, 6),
        (math.pi / 2, 1.0, 0.0, 0.0): (6, 4),  # clockwise: from three to six o'clock
        (0.0, 0.5, 0.0, 0.0): (4, 5),
        (0.0, 1.0, pixel, 0.0): (4, 7),
        (0.0, 1.0, 0.0, 2 * pixel): (6, 6),
        (math.pi, 1.0, pixel, 0.0): (4, 3),  # rotated first, then shifted
    }
    for values, place in cases.items():
        moved = transformed(image, torch.tensor([values]))[0]
        assert divmod(int(moved.argmax()), 9) == place, values


def test_the_grid_is_full_and_nothing_leaves_the_frame() -> None:
    digits = embedded_digits().pixels[:, 0].float() / 16
    grid = full_grid(digits)
    assert sorted(map(tuple, grid.level.tolist())) == sorted(
        itertools.product(range(5), repeat=len(NAMES))
    )
    for level, value in zip(grid.level.T, grid.value.T, strict=True):
        pairs = sorted(set(zip(level.tolist(), value.tolist(), strict=True)))
        assert len(pairs) == 5  # one value per level
        assert [value for _, value in pairs] == sorted({value for _, value in pairs})
    # The corners of the outermost pixels with ink, moved by hand.
    inked = (digits > 0.05).any(0).nonzero().tolist()
    for row, column in itertools.product(*(sorted({at[k] for at in inked}) for k in (0, 1))):
        for x, y in itertools.product(
            (column / 4 - 1, column / 4 - 0.75), (row / 4 - 1, row / 4 - 0.75)
        ):
            angle, scale, right, down = grid.value.double().unbind(1)
            across = scale * (angle.cos() * x - angle.sin() * y) + right
            along = scale * (angle.sin() * x + angle.cos() * y) + down
            assert float(torch.stack([across, along]).abs().max()) <= 1 + 1e-6


def test_moved_images_keep_their_ink() -> None:
    digits = embedded_digits().pixels[:50, 0].float() / 16
    stream = torch.Generator().manual_seed(0)
    moved, factors = moved_images(digits, 2, stream)
    assert moved.shape == (1250, 8, 8)
    assert bool((moved >= 0).all() and (moved <= 1).all())
    for level, value in zip(factors.level.T, factors.value.T, strict=True):
        assert len(set(zip(level.tolist(), value.tolist(), strict=True))) == 5
    # Ink goes with the square of the scale; sampling 8x8 pixels is coarse.
    ink = (moved.sum((1, 2)) / factors.value[:, 1] ** 2).mean()
    assert ink.item() == pytest.approx(digits.sum((1, 2)).mean().item(), rel=0.05)


def test_the_image_is_independent_of_the_factors() -> None:
    bright = torch.stack([torch.full((8, 8), 0.2), torch.full((8, 8), 1.0)])
    moved, factors = moved_images(bright, 8, torch.Generator().manual_seed(0))
    is_second = (moved.amax((1, 2)) > 0.5).float()
    for column in factors.level.T:
        shares = [is_second[column == level].mean().item() for level in range(5)]
        assert all(abs(share - 0.5) < 0.08 for share in shares)
