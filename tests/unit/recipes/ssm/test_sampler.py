"""The fast sampler draws normal entries and sums their powers as the slow arithmetic does."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from tests.one_block import sample_block

from muster_recipes.ssm import sampler_cpu, sampler_cuda
from muster_recipes.ssm.sampler import Block, BlockResult, Moments

ALPHA = 0.5
H = [ALPHA**m for m in range(1, 5)]
EPS = 1e-5

# (w, mean L_gen of the accepted, acceptance rate) at d = 150: independent runs of 1e9 samples.
ORACLES = [
    ((1.0, 0.0, 0.0, 0.0), 0.5838, 2.229e-3),
    ((1.0, 1.0, 1.0, 1.0), 0.9238, 2.453e-3),
    ((0.01, 0.01, 0.01, 1.0), 5.049, 1.568e-3),
]
PRIOR_MEAN = 1.8440
REFERENCE_ROUNDING = 5e-4  # the references are given to three or four digits


def normals_of(raw: np.ndarray, dim: int, students: int) -> np.ndarray:
    """The entries [students, dim] that these random bits stand for, in float64.

    The uniform is rounded to float32 as the sampler does; all the rest is the textbook's
    Box-Muller, turned by 45 degrees.
    """
    words = raw.view(np.uint32)
    radius, angle = (words[: raw.size] >> 1).view(np.int32), words[raw.size :].view(np.int32)
    uniform = radius.astype(np.float32) * np.float32(2.0**-31) + np.float32(2.0**-32)
    r = np.sqrt(-2.0 / dim * np.log(uniform.astype(np.float64)))
    phi = angle.astype(np.float64) * (math.pi / 2**32)
    x, y = r * np.cos(phi - math.pi / 4), r * np.sin(phi - math.pi / 4)
    entries = np.stack([x, y], axis=1).reshape(raw.size, 2)
    if dim % 2 == 1:
        entries[-students:, 0] = (r * np.sin(phi))[-students:]
    pairs = entries.reshape(-1, students, 2)
    return pairs.transpose(1, 0, 2).reshape(students, -1)[:, :dim]


def slow_losses(
    entries: np.ndarray, h: Sequence[float], w: Sequence[Sequence[float]]
) -> tuple[np.ndarray, np.ndarray]:
    """(L_train, L_gen) from materialised powers [students, dim, K] in float64."""
    powers = np.stack([entries**m for m in range(1, len(h) + 1)], axis=-1)
    errors = np.einsum("bdk->bk", powers) - np.asarray(h)
    train = (np.einsum("bk,nk->bn", errors, np.asarray(w)) ** 2).mean(axis=1)
    return train, (errors**2).sum(axis=1)


@pytest.mark.parametrize("dim", [1, 2, 3, 8, 150, 151])
@pytest.mark.parametrize("lags", [1, 2, 3, 4, 7])
def test_fast_path_equals_float64_on_the_same_draws(dim: int, lags: int) -> None:
    students = 512
    h = [ALPHA**m for m in range(1, lags + 1)]
    w = np.random.default_rng(5).standard_normal((3, lags)).tolist()
    raw = np.random.SFC64(11).random_raw((dim + 1) // 2 * students)
    train, gen = slow_losses(normals_of(raw.copy(), dim, students), h, w)
    work = sampler_cpu.buffers(raw.size)
    sums = np.zeros((lags, students))
    sampler_cpu.add_tile_sums(raw, dim, dim % 2 == 1, work, sums)
    fast_train, fast_gen = sampler_cpu.losses(sums, np.asarray(h), np.asarray(w))
    # Where single entries are large next to the result, compare with the size of what is added.
    scale = np.maximum(gen, 0.1)
    assert np.max(np.abs(fast_gen - gen) / scale) < 1e-5
    assert np.max(np.abs(np.sqrt(fast_train) - np.sqrt(train)) / np.sqrt(scale)) < 1e-5


@pytest.mark.parametrize("lags", [1, 2, 3, 4, 9])
def test_powers_of_given_normals(lags: int) -> None:
    """From x + y and x^2 + y^2 alone, every power sum of the pair follows."""
    x, y = np.random.default_rng(2).standard_normal((2, 75, 64)) / math.sqrt(150)
    sums = np.zeros((lags, 64))
    work = [np.empty((75, 64), dtype=np.float32) for _ in range(3)]
    p1, p2 = (x + y).astype(np.float32), (x**2 + y**2).astype(np.float32)
    sampler_cpu.add_power_sums(p1, p2, *work, sums)
    for m in range(1, lags + 1):
        magnitude = (np.abs(x) ** m + np.abs(y) ** m).sum(axis=0)
        error = np.abs(sums[m - 1] - (x**m + y**m).sum(axis=0))
        # The rounding of p1 and p2 to float32 counts m times in the m-th power.
        assert np.all(error < 5e-7 * (m + 1) * magnitude)


@pytest.mark.parametrize("dim", [1, 2, 5, 300, 301])
def test_students_spread_over_several_tiles(dim: int) -> None:
    """A block equals the slow sum over all tiles, also where the last of each kind is partial."""
    layout = sampler_cpu.Layout.of(dim)
    num_samples = 2 * layout.width + 37
    result = sample_block(h=H, w=[H], dim=dim, num_samples=num_samples, seed=9, eps=0.3)
    bits = np.random.SFC64(9)
    trains, gens = [], []
    for start in range(0, num_samples, layout.width):
        students = min(layout.width, num_samples - start)
        tiles = []
        for row in range(0, layout.num_pairs, layout.rows):
            rows = min(layout.rows, layout.num_pairs - row)
            # The scale 1/dim belongs to the student; the parity that matters is the tile's own.
            own = min(2 * rows, dim - 2 * row)
            raw = bits.random_raw(rows * students)
            tiles.append(normals_of(raw, own, students) * math.sqrt(own / dim))
        train, gen = slow_losses(np.concatenate(tiles, axis=1), H, [H])
        trains.append(train)
        gens.append(gen)
    train, gen = np.concatenate(trains), np.concatenate(gens)
    assert result.all.count == num_samples
    assert result.all.mean == pytest.approx(gen.mean(), rel=1e-6)
    assert result.all.m2 == pytest.approx(((gen - gen.mean()) ** 2).sum(), rel=1e-5)
    fits = gen[train < 0.3]
    assert result.accepted.count == len(fits)
    assert result.accepted.mean == pytest.approx(fits.mean(), rel=1e-6)


def test_entries_are_normal() -> None:
    """Moments up to the sixth, tails, and independence of the two entries of a pair."""
    students, dim = 200_000, 2
    raw = np.random.SFC64(3).random_raw(students)
    entries = normals_of(raw, dim, students) * math.sqrt(dim)
    # Half a turn draws the pair without its order, which no power sum can see; give it one.
    entries[::2] = entries[::2, ::-1].copy()
    count = entries.size
    moments = [(1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96), (6, 15, 10170)]
    for power, expected, variance in moments:
        error = abs(np.mean(entries**power) - expected)
        assert error < 4 * math.sqrt(variance / count), power
    beyond = np.mean(np.abs(entries) > 4.0)
    assert beyond == pytest.approx(math.erfc(4 / math.sqrt(2)), abs=4 * math.sqrt(6.3e-5 / count))
    for a, b in [(1, 1), (2, 2), (1, 3), (3, 3)]:
        x, y = entries[:, 0] ** a, entries[:, 1] ** b
        assert abs(np.corrcoef(x, y)[0, 1]) < 4 / math.sqrt(students), (a, b)


@pytest.mark.parametrize(
    ("w", "mean", "rate"),
    [ORACLES[0], *(pytest.param(*one, marks=pytest.mark.thorough) for one in ORACLES[1:])],
)
def test_reproduces_independent_runs(w: tuple[float, ...], mean: float, rate: float) -> None:
    check_oracle(w, mean, rate, num_samples=3_000_000)


@pytest.mark.slow
@pytest.mark.parametrize(("w", "mean", "rate"), ORACLES)
def test_reproduces_independent_runs_closely(
    w: tuple[float, ...], mean: float, rate: float
) -> None:
    check_oracle(w, mean, rate, num_samples=60_000_000)


def check_oracle(w: tuple[float, ...], mean: float, rate: float, num_samples: int) -> None:
    result = sample_block(h=H, w=[w], dim=150, num_samples=num_samples, seed=2026, eps=EPS)
    accepted, everything = result.accepted, result.all
    assert accepted.standard_error is not None
    assert everything.standard_error is not None
    assert abs(accepted.mean - mean) < 3 * accepted.standard_error + REFERENCE_ROUNDING
    expected = rate * num_samples
    assert abs(accepted.count - expected) < 3 * math.sqrt(expected) + REFERENCE_ROUNDING * expected
    assert abs(everything.mean - PRIOR_MEAN) < 4 * everything.standard_error


def test_same_seed_same_bits_and_another_seed_another_block() -> None:
    def block(seed: int) -> BlockResult:
        return sample_block(h=H, w=[H], dim=7, num_samples=20_000, seed=seed, eps=0.01)

    assert block(4) == block(4)
    assert block(4) != block(5)


def test_none_accepted_has_no_value() -> None:
    result = sample_block(h=H, w=[H], dim=6, num_samples=100, seed=1, eps=1e-300)
    assert result.accepted == Moments.none()
    assert result.accepted.value is None
    assert result.all.count == 100


def test_any_threshold_accepts_a_loss_of_0() -> None:
    """w = 0 makes every training loss exactly 0."""
    result = sample_block(h=H, w=[[0.0] * 4], dim=6, num_samples=50, seed=1, eps=5e-324)
    assert result.accepted.count == 50


def test_philox_known_answers() -> None:
    """The published test vector of Philox-4x32-10 (Random123, kat_vectors)."""
    words = sampler_cuda.philox(torch.tensor([0]), 0, 0, 0)
    assert [int(word) for word in words] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


@pytest.mark.parametrize("dim", [1, 2, 3, 4, 5, 6, 7])
def test_plain_torch_path_agrees_with_the_cpu_sampler(dim: int) -> None:
    """The CUDA sampler without Triton, run on this processor: other draws, same distribution."""
    w = [(1.0, 0.5, 0.0, -0.5)]
    one, other = (
        Block(h=H, w=w, dim=dim, num_samples=100_000, seed=seed, eps=0.05) for seed in (5, 6)
    )
    plain = sampler_cuda.sample_blocks_cuda([one], "cpu")[0]
    fast = sampler_cpu.sample_block_cpu(other)
    for ours, theirs in ((plain.all, fast.all), (plain.accepted, fast.accepted)):
        assert ours.standard_error is not None
        assert theirs.standard_error is not None
        spread = math.hypot(ours.standard_error, theirs.standard_error)
        assert abs(ours.mean - theirs.mean) < 4 * spread
    difference = plain.accepted.count - fast.accepted.count
    assert abs(difference) < 4 * math.sqrt(plain.accepted.count + fast.accepted.count)


def test_partials_merge_as_moments_do() -> None:
    blocks = [[1.0, 2.0, 4.0], [], [8.0], [3.0, 3.5]]
    parts = [Moments.of(block) for block in blocks]
    table = torch.tensor([[p.count, p.mean, p.m2] for p in parts], dtype=torch.float64).T
    merged = sampler_cuda.merge_partials(table)
    expected = Moments.of([value for block in blocks for value in block])
    assert merged.tolist() == pytest.approx([expected.count, expected.mean, expected.m2])
    none = sampler_cuda.merge_partials(torch.zeros(2, 3, 4, dtype=torch.float64))
    assert none.tolist() == [[0.0, 0.0, 0.0]] * 2
