"""The sampler on a CUDA device: kernel against plain torch, against the CPU, and against itself."""

from __future__ import annotations

import math
import time

import pytest
import torch
from tests.one_block import sample_block

from muster_recipes.ssm import sampler_cuda
from muster_recipes.ssm.sampler import Block, BlockResult, Moments, sample_blocks

pytestmark = pytest.mark.gpu

H = [0.5**m for m in range(1, 5)]
E1 = [(1.0, 0.0, 0.0, 0.0)]
W3 = [(1.0, 0.5, 0.0, -0.5), (0.2, -1.0, 0.3, 0.0), (0.0, 0.1, 2.0, 1.0)]


@pytest.fixture(autouse=True)
def cuda_device() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")


def block(device: str, seed: int = 3, num_samples: int = 2_000_000, dim: int = 150) -> BlockResult:
    return sample_block(
        h=H, w=E1, dim=dim, num_samples=num_samples, seed=seed, eps=1e-3, device=device
    )


def assert_agree(ours: Moments, theirs: Moments) -> None:
    """Means of independent samples within four standard errors."""
    assert ours.standard_error is not None
    assert theirs.standard_error is not None
    spread = math.hypot(ours.standard_error, theirs.standard_error)
    assert abs(ours.mean - theirs.mean) < 4 * spread


@pytest.mark.parametrize("dim", [1, 2, 3, 4, 15, 150])
def test_agrees_with_the_cpu_sampler(dim: int) -> None:
    cuda, cpu = block("cuda", dim=dim), block("cpu", dim=dim, num_samples=1_000_000)
    assert_agree(cuda.all, cpu.all)
    if cpu.accepted.count > 50:
        assert_agree(cuda.accepted, cpu.accepted)
    expected = 2 * cpu.accepted.count
    # Var(count_cuda - 2 count_cpu) = 2 n + 4 n for n = E[count_cpu].
    assert abs(cuda.accepted.count - expected) <= 4 * math.sqrt(6 * cpu.accepted.count) + 4


@pytest.mark.parametrize("dim", [1, 2, 3, 4, 5, 150, 151])
@pytest.mark.parametrize("lags", [1, 2, 4, 8])
@pytest.mark.parametrize("seed", [7, 2**64 - 5])
def test_the_kernel_draws_what_plain_torch_draws(dim: int, lags: int, seed: int) -> None:
    """Same counters, same students; a rounding may carry one across the threshold."""
    pytest.importorskip("triton")
    h = [0.5**m for m in range(1, lags + 1)]
    w = [(row * 2)[:lags] for row in W3]
    whole = Block(h=h, w=w, dim=dim, num_samples=10_007, seed=seed, eps=0.3)
    grid = [sampler_cuda.Part(whole, 2, 10_007)]
    table = next(sampler_cuda.staged([grid], torch.device("cuda")))
    fused, plain = (
        [Moments(int(count), mean, m2) for count, mean, m2 in draw(grid, table)[0].tolist()]
        for draw in (sampler_cuda.fused_grid, sampler_cuda.plain_grid)
    )
    assert fused[1].count == plain[1].count == 10_007
    assert fused[1].mean == pytest.approx(plain[1].mean, rel=1e-5)
    assert fused[1].m2 == pytest.approx(plain[1].m2, rel=1e-4)
    assert abs(fused[0].count - plain[0].count) <= 2
    if fused[0].count == plain[0].count > 0:
        assert fused[0].mean == pytest.approx(plain[0].mean, rel=1e-4)


def test_same_seed_same_bits() -> None:
    assert block("cuda") == block("cuda")
    assert block("cuda") != block("cuda", seed=4)


def test_more_lags_than_the_kernel_has() -> None:
    h = [0.5**m for m in range(1, 11)]
    w = [tuple(1.0 for _ in h)]
    results = [
        sample_block(h=h, w=w, dim=9, num_samples=200_000, seed=1, eps=0.1, device=device)
        for device in ("cuda", "cpu")
    ]
    assert_agree(results[0].all, results[1].all)
    assert_agree(results[0].accepted, results[1].accepted)


def test_reproduces_an_independent_run_over_several_parts() -> None:
    """w = e1, d = 150, eps = 1e-5: 0.5838, 2.229e-3 accepted, prior mean 1.8440."""
    pytest.importorskip("triton")
    num_samples = 2 * sampler_cuda.STUDENTS_PER_PART + 1_000_003
    result = sample_block(
        h=H, w=E1, dim=150, num_samples=num_samples, seed=1, eps=1e-5, device="cuda"
    )
    assert result.all.count == num_samples
    assert result.accepted.standard_error is not None
    assert result.all.standard_error is not None
    assert abs(result.accepted.mean - 0.5838) < 3 * result.accepted.standard_error + 5e-4
    assert result.accepted.count / num_samples == pytest.approx(2.229e-3, rel=0.01)
    assert abs(result.all.mean - 1.8440) < 4 * result.all.standard_error + 5e-5


def test_blocks_that_are_launched_together_are_those_drawn_alone() -> None:
    """A block of several parts, a narrow one, and one with another teacher and width."""
    pytest.importorskip("triton")
    sizes = [(150, sampler_cuda.STUDENTS_PER_PART + 5, 1), (3, 1_000, 2), (16, 2_000_000, 3)]
    sizes += [(16, 1_999_999, 2), (16, 100, 1)]
    blocks = [
        Block(h=H, w=[W3[seed - 1]], dim=dim, num_samples=size, seed=seed, eps=0.01)
        for dim, size, seed in sizes
    ]
    together = sample_blocks(blocks, "cuda")
    assert together == [sample_blocks([block], "cuda")[0] for block in blocks]


def test_many_blocks_keep_the_device_busy() -> None:
    """Launching 64 small blocks takes the host far less time than the device has work."""
    pytest.importorskip("triton")
    blocks = [
        Block(h=H, w=E1, dim=16, num_samples=2_000_000, seed=seed, eps=1e-5) for seed in range(64)
    ]
    sample_blocks(blocks, "cuda")
    grid = [sampler_cuda.Part(block, 0, block.num_samples) for block in blocks]
    table = next(sampler_cuda.staged([grid], torch.device("cuda")))
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    started = time.perf_counter()
    sampler_cuda.fused_grid(grid, table)
    host_ms = 1000 * (time.perf_counter() - started)
    end.record()
    torch.cuda.synchronize()
    assert host_ms < begin.elapsed_time(end)
