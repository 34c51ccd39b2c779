"""The tasks of a configuration: blocks of Guess & Check, and cells of gradient descent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from muster import RecipeTask
from muster_recipes.ssm.config import SsmConfig
from muster_recipes.ssm.problem import Problem, problems
from muster_recipes.ssm.theory import acceptance_rate

#: A mean over fewer accepted guesses than this says little.
FEW = 10


def plan(config: SsmConfig) -> Iterator[RecipeTask]:
    """Gradient descent first (its joint calls are the longest tasks), then blocks, wide first."""
    if config.gd:
        settings = _gd_params(config)
        for cell in _cells(config):
            yield RecipeTask("gd", {**_params(*cell), **settings}, priority=1)
    if config.gnc:
        for cell in _cells(config):
            for block in range(num_blocks(config)):
                yield RecipeTask("gnc", _gnc_params(config, block, *cell))


def count(config: SsmConfig) -> int:
    """How many tasks ``plan`` gives."""
    cells = len(config.all_seeds) * len(config.teacher_ranks) * len(config.student_dims)
    return cells * (num_blocks(config) * config.gnc + config.gd)


def num_blocks(config: SsmConfig) -> int:
    """Blocks per cell; the last may be smaller."""
    return -(-config.gnc_num_samples // config.gnc_batch_size)


def block_size(config: SsmConfig, block: int) -> int:
    return min(config.gnc_batch_size, config.gnc_num_samples - block * config.gnc_batch_size)


def forecast(config: SsmConfig) -> list[str]:
    """Warnings before hours are spent: cells in which hardly a guess will be accepted."""
    if not config.gnc:
        return []
    poor = []
    for seed, rank, dim, problem in _cells(config):
        rate = acceptance_rate(problem, dim, config.eps_train)
        if rate is not None and rate * config.gnc_num_samples < FEW:
            poor.append(f"seed {seed}, rank {rank}, d = {dim}")
    if not poor:
        return []
    more = f" and {len(poor) - 3} more" if len(poor) > 3 else ""
    return [
        f"{len(poor)} cell{'s' * (len(poor) > 1)} will accept fewer than {FEW} of "
        f"{config.gnc_num_samples:,} guesses by the Gaussian estimate "
        f"({'; '.join(poor[:3])}{more}): raise --gnc-num-samples or --eps-train."
    ]


def _cells(config: SsmConfig) -> Iterator[tuple[int, int, int, Problem]]:
    """The widest students of all seeds first, so that no long block comes last."""
    drawn = list(problems(config))
    for dim in sorted(config.student_dims, reverse=True):
        for seed, rank, problem in drawn:
            yield seed, rank, dim, problem


def _params(seed: int, rank: int, dim: int, problem: Problem, **block: int) -> dict[str, Any]:
    teacher = {"alpha": list(problem.alpha), "w": [list(row) for row in problem.w]}
    return {"seed": seed, "rank": rank, "dim": dim, **block, **teacher}


def _gnc_params(config: SsmConfig, block: int, *cell: Any) -> dict[str, Any]:
    params = _params(*cell, block=block, num_samples=block_size(config, block))
    return {**params, "eps": config.eps_train}


def _gd_params(config: SsmConfig) -> dict[str, Any]:
    names = ("lr", "epochs", "init_scale", "optimizer", "scheduler", "init_type")
    sizes = {"num_lags": config.num_lags, "num_sequences": config.num_sequences}
    return {**sizes, **{name: getattr(config, f"gd_{name}") for name in names}}
