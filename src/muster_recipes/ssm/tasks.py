"""What runs on a worker: blocks of Guess & Check, and gradient descent of many cells at once."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from muster import Context, batched
from muster_recipes.ssm.gd import GdCell, GdSettings, train
from muster_recipes.ssm.problem import Problem, stream_seed
from muster_recipes.ssm.sampler import Block, sample_blocks

Task = Mapping[str, Any]


@batched(static=("dim",), max_batch=256, max_batch_on_cpu=1)
def gnc_block(tasks: Sequence[Task], ctx: Context) -> list[dict[str, Any]]:
    """Draw the blocks of a call. α and w are parameters, so a task's key covers its data.

    A GPU draws up to 256 blocks by a launch or two: half a billion students of the default size.
    All blocks of a call are said to have the call's rate, because they are drawn at once.
    """
    blocks = [
        Block(
            h=problem.h,
            w=problem.w,
            dim=task["dim"],
            num_samples=task["num_samples"],
            seed=stream_seed("ssm-gnc", task["seed"], task["rank"], task["dim"], task["block"]),
            eps=task["eps"],
        )
        for task, problem in zip(tasks, map(_problem, tasks), strict=True)
    ]
    begin = time.perf_counter()
    results = sample_blocks(blocks, ctx.device)
    rate = sum(block.num_samples for block in blocks) / (time.perf_counter() - begin)
    return [
        {
            "num_accepted": result.accepted.count,
            "accepted_mean": result.accepted.value,
            "accepted_m2": result.accepted.m2 if result.accepted.count else None,
            "num_drawn": result.all.count,
            "drawn_mean": result.all.value,
            "drawn_m2": result.all.m2,
            "students_per_s": rate,
        }
        for result in results
    ]


@batched(static=("num_lags", "num_sequences", "lr", "epochs", "init_scale", "optimizer", "scheduler", "init_type"), max_batch=512)  # fmt: skip  # noqa: E501
def gd_cells(tasks: Sequence[Task], ctx: Context) -> list[dict[str, Any]]:
    """Train all cells of a call in one batched program."""
    torch.set_num_threads(1)
    names = [field.name for field in dataclasses.fields(GdSettings)]
    settings = GdSettings(**{name: tasks[0][name] for name in names})
    cells = []
    for task in tasks:
        problem = _problem(task)
        stream = stream_seed("ssm-gd", task["seed"], task["rank"], task["dim"])
        cells.append(GdCell(problem.h, problem.w, task["dim"], stream))
    losses = train(cells, settings, ctx.device)
    return [{"train_loss": train_loss, "gen_loss": gen_loss} for train_loss, gen_loss in losses]


def _problem(task: Task) -> Problem:
    return Problem(tuple(task["alpha"]), tuple(map(tuple, task["w"])))
