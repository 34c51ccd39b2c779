"""Blocks that share a call are drawn as each would be alone, and the device never waits for us."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from muster_recipes.ssm import sampler_cuda, tasks
from muster_recipes.ssm.sampler import Block, sample_blocks

H = [0.5**m for m in range(1, 5)]
W3 = [(1.0, 0.5, 0.0, -0.5), (0.2, -1.0, 0.3, 0.0), (0.0, 0.1, 2.0, 1.0)]
BLOCKS = [
    Block(h=H, w=W3, dim=7, num_samples=3_000, seed=11, eps=0.3),
    Block(h=H[:3], w=[(0.0, 0.0, 1.0)], dim=4, num_samples=500, seed=2**64 - 5, eps=1e-3),
    Block(
        h=[0.5**m for m in range(1, 11)], w=[(1.0,) * 10], dim=2, num_samples=64, seed=3, eps=9.0
    ),
    Block(h=H, w=W3[:1], dim=150, num_samples=200, seed=11, eps=1e-9),
]
#: Of version 0.1.0: count, mean and squared deviations of the accepted, and of all.
BEFORE = [
    (891, 0.3637473923588067, 48.74661930982657, 3000, 2.918408018237662, 54119.85878250328),
    (22, 0.41946093859760114, 15.425666732976506, 500, 2.838284936545106, 8380.302732900565),
    (42, 3.45417108860925, 6243.50045683232, 64, 51749.50506740712, 9359358643597.15),
    (0, 0.0, 0.0, 200, 1.8042625036891622, 501.28666514237943),
]


def test_the_path_for_gpus_draws_the_students_of_version_0_1_0() -> None:
    """Whose calls held one block each. Another processor may round its sines otherwise."""
    for found, expected in zip(sampler_cuda.sample_blocks_cuda(BLOCKS, "cpu"), BEFORE, strict=True):
        fits, drawn = found
        assert (fits.count, drawn.count) == (expected[0], expected[3])
        numbers = (fits.mean, fits.m2, drawn.mean, drawn.m2)
        assert numbers == pytest.approx((*expected[1:3], *expected[4:]), rel=1e-5)


@pytest.mark.parametrize("device", ["cpu", "plain"])
def test_a_block_does_not_depend_on_its_neighbours(device: str) -> None:
    def drawn(blocks: list[Block]) -> list[Any]:
        if device == "cpu":
            return sample_blocks(blocks, "cpu")
        return sampler_cuda.sample_blocks_cuda(blocks, "cpu")

    together = drawn(BLOCKS)
    assert together == [drawn([block])[0] for block in BLOCKS]
    assert drawn(BLOCKS[::-1]) == together[::-1]


def test_the_inputs_of_all_blocks_arrive_whole_and_on_16_bytes() -> None:
    grids = [[sampler_cuda.Part(block, 3, 99)] for block in BLOCKS]
    for block, table in zip(BLOCKS, sampler_cuda.staged(grids, torch.device("cpu")), strict=True):
        low, high, *rest = table[0].tolist()
        assert int(low) | int(high) << 32 == block.seed
        entries = [3, 99, block.eps, *block.h, *(x for row in block.w for x in row)]
        assert rest[: len(entries)] == entries
        assert table.data_ptr() % 16 == 0 and table.is_contiguous()


def test_merging_what_a_launch_left_asks_the_device_for_nothing() -> None:
    """A meta tensor has no values: whoever looks at one raises."""
    partials = torch.empty(2, 3, 7_813, dtype=torch.float64, device="meta")
    assert sampler_cuda.merge_partials(partials).shape == (2, 3)


def test_without_a_compiler_the_plain_operations_are_taken_and_it_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def launch() -> None:
        raise RuntimeError("Failed to find C compiler. Please specify via CC.\nmore")

    with caplog.at_level(logging.WARNING, "muster"):
        assert not sampler_cuda.does_run(launch)
    assert "Failed to find C compiler. Please specify via CC.): plain tensor" in caplog.text
    assert sampler_cuda.does_run(lambda: None)
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("CUDA error: out of memory"),
    ],
)
def test_a_full_device_is_not_taken_for_a_missing_compiler(error: Exception) -> None:
    def launch() -> None:
        raise error

    with pytest.raises(type(error)):
        sampler_cuda.does_run(launch)


def test_tasks_of_a_call_have_the_results_of_calls_of_their_own() -> None:
    ctx: Any = SimpleNamespace(device="cpu")
    shared = {"rank": 1, "alpha": [0.5], "w": [[1.0, 0.0, 0.0, 0.0]], "eps": 1e-2}
    asked = [
        {**shared, "seed": seed, "dim": 8, "block": block, "num_samples": 400 + block}
        for seed in (0, 1)
        for block in (0, 1)
    ]

    def results(call: list[dict[str, Any]]) -> list[dict[str, Any]]:
        made = tasks.gnc_block(call, ctx)
        assert all(result.pop("students_per_s") > 0 for result in made)
        return made

    together = results(asked)
    assert together == [results([one])[0] for one in asked]
    assert [result["num_drawn"] for result in together] == [400, 401, 400, 401]
