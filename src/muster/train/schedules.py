"""Learning rate as a pure function of the optimizer step, whatever the number of ranks."""

from __future__ import annotations

import math

from muster.train.config import ScheduleName


def factor_at(
    step: int, *, schedule: ScheduleName, warmup_steps: int, total_steps: int, floor: float
) -> float:
    """What the learning rate is multiplied by in optimizer step ``step`` (from 0).

    It rises linearly to 1 over ``warmup_steps``, where the first step already has 1/(warmup + 1)
    of it, then falls to ``floor`` at ``total_steps`` (cosine: Loshchilov and Hutter 2017,
    arXiv:1608.03983, equation 5 without restarts).
    """
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    if schedule == "constant":
        return 1.0
    span = max(1, total_steps - warmup_steps)
    done = min(1.0, (step - warmup_steps) / span)
    shape = 1 - done if schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return floor + (1 - floor) * shape
