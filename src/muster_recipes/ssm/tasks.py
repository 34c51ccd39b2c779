"""What runs on a worker: a block of Guess & Check, and gradient descent of many cells at once."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from muster import Context, batched
from muster_recipes.ssm.gd import GdCell, GdSettings, train
from muster_recipes.ssm.problem import Problem
from muster_recipes.ssm.sampler import sample_block
from muster_recipes.ssm.streams import stream_seed


def gnc_block(
    seed: int,
    rank: int,
    dim: int,
    block: int,
    num_samples: int,
    alpha: list[float],
    w: list[list[float]],
    eps: float,
    ctx: Context,
) -> dict[str, Any]:
    """Draw one block of students. α and w are parameters, so the task's key is its content."""
    problem = _problem(alpha, w)
    begin = time.perf_counter()
    result = sample_block(
        h=problem.h,
        w=problem.w,
        dim=dim,
        num_samples=num_samples,
        seed=stream_seed("ssm-gnc", seed, rank, dim, block),
        eps=eps,
        device=ctx.device,
    )
    seconds = time.perf_counter() - begin
    accepted, drawn = result.accepted, result.all
    return {
        "num_accepted": accepted.count,
        "accepted_mean": accepted.value,
        "accepted_m2": accepted.m2 if accepted.count else None,
        "num_drawn": drawn.count,
        "drawn_mean": drawn.value,
        "drawn_m2": drawn.m2,
        "students_per_s": num_samples / seconds,
    }


@batched(static=("num_lags", "num_sequences", "lr", "epochs", "init_scale", "optimizer", "scheduler", "init_type"), max_batch=512)  # fmt: skip  # noqa: E501
def gd_cells(tasks: Sequence[Mapping[str, Any]], ctx: Context) -> list[dict[str, Any]]:
    """Train all cells of a call in one batched program."""
    torch.set_num_threads(1)
    first = tasks[0]
    settings = GdSettings(
        lr=first["lr"],
        epochs=first["epochs"],
        init_scale=first["init_scale"],
        optimizer=first["optimizer"],
        scheduler=first["scheduler"],
        init_type=first["init_type"],
    )
    cells = []
    for task in tasks:
        problem = _problem(task["alpha"], task["w"])
        stream = stream_seed("ssm-gd", task["seed"], task["rank"], task["dim"])
        cells.append(GdCell(problem.h, problem.w, task["dim"], stream))
    losses = train(cells, settings, ctx.device)
    return [{"train_loss": train_loss, "gen_loss": gen_loss} for train_loss, gen_loss in losses]


def _problem(alpha: Sequence[float], w: Sequence[Sequence[float]]) -> Problem:
    return Problem(tuple(alpha), tuple(tuple(row) for row in w))
