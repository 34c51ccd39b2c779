"""The kernel's grid holds many blocks, each of which is drawn as if it were alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from tests.unit.recipes.ssm.triton_on_numpy import Kernel
from tests.unit.recipes.ssm.triton_on_numpy import kernel as kernel_on_numpy

from muster_recipes.ssm import sampler_cuda
from muster_recipes.ssm.sampler import Block
from muster_recipes.ssm.sampler_cuda import Part, fused_grid, plain_grid, staged

CPU = torch.device("cpu")
W3 = [(1.0, 0.5, 0.0, -0.5), (0.2, -1.0, 0.3, 0.0), (0.0, 0.1, 2.0, 1.0)]


@pytest.fixture(autouse=True)
def kernel() -> Iterator[Kernel]:
    with kernel_on_numpy() as found:
        yield found


def block(count: int, seed: int, dim: int = 7, lags: int = 4, eps: float = 0.3) -> Block:
    h = [0.5**m for m in range(1, lags + 1)]
    w = [(row * 2)[:lags] for row in W3]
    return Block(h=h, w=w, dim=dim, num_samples=count, seed=seed, eps=eps)


#: Of several sizes, teachers, thresholds and numbers within their blocks.
PARTS = [
    Part(block(700, 11), 0, 700),
    Part(block(3_000, 2**64 - 5, eps=0.05), 2, 1_500),
    Part(block(1, 7), 0, 1),
    Part(block(256, 2**33 + 1), 1, 256),
]


def drawn(grid: Sequence[Part]) -> torch.Tensor:
    return fused_grid(grid, next(staged([grid], CPU)))


def test_the_parts_of_a_grid_are_one_launch_and_each_has_the_bits_of_one_alone(
    kernel: Kernel,
) -> None:
    together = drawn(PARTS)
    assert kernel.launches == [(4 * 6,)]
    alone = torch.cat([drawn([part]) for part in PARTS])
    assert torch.equal(together, alone)
    assert torch.equal(drawn(PARTS[::-1]), alone.flip(0))


@pytest.mark.parametrize(("dim", "lags"), [(1, 1), (2, 8), (5, 3), (16, 4), (151, 4)])
def test_the_kernel_draws_what_plain_operations_draw(dim: int, lags: int) -> None:
    grid = [
        Part(block(count, seed, dim, lags), number, count)
        for count, seed, number in ((600, 3, 0), (300, 2**64 - 5, 1))
    ]
    table = next(staged([grid], CPU))
    fused, plain = fused_grid(grid, table), plain_grid(grid, table)
    assert fused[:, 1, 0].tolist() == [600, 300]
    torch.testing.assert_close(fused[:, 1], plain[:, 1], rtol=1e-4, atol=1e-12)
    assert (fused[:, 0, 0] - plain[:, 0, 0]).abs().max() <= 2  # a rounding at the threshold


def test_a_call_of_64_blocks_is_one_launch(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_cuda, "_is_fused", lambda place, lags: True)
    blocks = [block(100 + seed, seed) for seed in range(64)]
    together = sampler_cuda.sample_blocks_cuda(blocks, "cpu")
    assert kernel.launches == [(64,)]
    assert [fits_and_all[1].count for fits_and_all in together] == list(range(100, 164))
    # Other widths need other launches, and so does what a grid does not hold.
    kernel.launches.clear()
    mixed = [block(300, 1), block(300, 2), block(300, 3, dim=4), block(300, 4, dim=4, lags=2)]
    assert sampler_cuda.sample_blocks_cuda(mixed, "cpu")[1] == _alone(mixed[1])
    assert [grid for (grid,) in kernel.launches[:3]] == [4, 2, 2]
    monkeypatch.setattr(sampler_cuda, "PROGRAMS_PER_GRID", 16)
    kernel.launches.clear()
    assert sampler_cuda.sample_blocks_cuda(blocks, "cpu") == together
    assert kernel.launches == [(16,)] * 4


def _alone(one: Block) -> object:
    return sampler_cuda.sample_blocks_cuda([one], "cpu")[0]


def test_a_block_of_several_parts_is_split_where_it_always_was(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And its counters count on from there: the same students."""
    monkeypatch.setattr(sampler_cuda, "STUDENTS_PER_PART", 512)
    monkeypatch.setattr(sampler_cuda, "_is_fused", lambda place, lags: True)
    [(fits, everything)] = sampler_cuda.sample_blocks_cuda([block(1_100, 5)], "cpu")
    assert kernel.launches == [(3 * 2,)] and everything.count == 1_100
    monkeypatch.setattr(sampler_cuda, "_is_fused", lambda place, lags: False)
    [(same, plain)] = sampler_cuda.sample_blocks_cuda([block(1_100, 5)], "cpu")
    assert everything.mean == pytest.approx(plain.mean, rel=1e-5)
    assert abs(fits.count - same.count) <= 2
