"""Where a training is: its counters, which a checkpoint keeps, its losses and learning rate."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from muster.base.shown_text import count
from muster.rank.seeding import Position
from muster.rank.state import Standing
from muster.train.config import ScheduleName


class StepLoss(NamedTuple):
    """Sum of losses and of their weights in one attempt at a step, of one rank or of all."""

    attempt: int
    epoch: int
    total: float
    weight: float

    @property
    def mean(self) -> float:
        return self.total / self.weight


class Arriving:
    """A number on its way from a GPU to the host, or one that is there already.

    ``get`` waits for the copy alone, not for what the GPU has been given since.
    """

    def __init__(self, value: Tensor | float) -> None:
        self._value = value
        self._event: torch.cuda.Event | None = None
        if isinstance(value, Tensor) and value.is_cuda:
            host = torch.empty((), dtype=value.dtype, pin_memory=True)
            self._value = host.copy_(value, non_blocking=True)
            # Blocking: a host that waits gives its core away instead of spinning.
            self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._event.record()

    def get(self) -> float:
        if self._event is not None:
            self._event.synchronize()
        return float(self._value)


class _Waiting(NamedTuple):
    attempt: int
    epoch: int
    total: Arriving
    weight: float


class LossTrail:
    """Takes sums as tensors and returns numbers: at once on a CPU, two steps later on a GPU.

    By then the copy has arrived, so that nothing waits. ``flush`` returns the rest.
    """

    def __init__(self, device: torch.device) -> None:
        self.lag = 2 if device.type == "cuda" else 0
        self._waiting: deque[_Waiting] = deque()

    def push(
        self, attempt: int, epoch: int, total: Tensor | float, weight: float
    ) -> StepLoss | None:
        """The loss that is ``lag`` attempts old; None while there is none.

        Every rank pushes once per attempt, with or without samples, so that what the ranks get
        back is of the same attempt.
        """
        if not self.lag:
            return StepLoss(attempt, epoch, float(total), weight)
        self._waiting.append(_Waiting(attempt, epoch, Arriving(total), weight))
        return self._pop() if len(self._waiting) > self.lag else None

    def drop(self) -> None:
        """Forget the newest: its step is made again."""
        if self._waiting:
            self._waiting.pop()

    def flush(self) -> list[StepLoss]:
        return [self._pop() for _ in range(len(self._waiting))]

    def _pop(self) -> StepLoss:
        attempt, epoch, total, weight = self._waiting.popleft()
        return StepLoss(attempt, epoch, total.get(), weight)


@dataclass(kw_only=True)
class Progress(Standing):
    """``step``: optimizer steps that were applied; ``attempts``: those and the skipped ones.

    ``samples`` counts all samples consumed so far. ``num_bad``: evaluations since the best one.
    ``loss_sum`` and ``loss_weight`` belong to the epoch ``loss_epoch`` alone.
    """

    step: int = 0
    attempts: int = 0
    samples: int = 0
    epoch: int = 0
    offset: int = 0
    num_bad: int = 0
    last_loss: float | None = None
    loss_epoch: int = 0
    loss_sum: float = 0.0
    loss_weight: float = 0.0

    @property
    def position(self) -> Position:
        return Position(self.epoch, self.offset)

    def advance(self, position: Position, samples: int, *, applied: bool) -> None:
        self.epoch, self.offset = position
        self.samples += samples
        self.attempts += 1
        self.step += applied

    @property
    def epoch_loss(self) -> float | None:
        """The mean over the samples (or other terms) of the epoch whose losses came last."""
        return self.loss_sum / self.loss_weight if self.loss_weight > 0 else None

    def add_loss(self, loss: StepLoss) -> None:
        """Take note of an attempt's loss over all ranks; a new epoch begins a new mean."""
        if loss.epoch != self.loss_epoch:
            self.loss_epoch, self.loss_sum, self.loss_weight = loss.epoch, 0.0, 0.0
        self.loss_sum += loss.total
        self.loss_weight += loss.weight
        self.last_loss = loss.mean

    def judge(self, value: float, *, higher_is_better: bool) -> bool:
        """Take note of a monitored value; True when it is the best so far. NaN never is."""
        is_better = self.improves(value, self.step, higher_is_better=higher_is_better)
        self.num_bad = 0 if is_better else self.num_bad + 1
        return is_better


@dataclass(frozen=True, kw_only=True)
class Limits:
    """When a training is over, in optimizer steps and epochs."""

    steps_per_epoch: int
    epochs: int
    max_steps: int | None
    patience: int | None
    eval_frequency: int

    @cached_property
    def total_steps(self) -> int:
        planned = self.steps_per_epoch * self.epochs
        return planned if self.max_steps is None else min(planned, self.max_steps)

    def is_over(self, progress: Progress) -> str | None:
        """Why the training is over, or None."""
        if progress.epoch >= self.epochs:
            return f"{self.epochs} epochs"
        if self.max_steps is not None and progress.step >= self.max_steps:
            return f"--max-steps {self.max_steps}"
        if self.patience is not None and progress.num_bad >= self.patience:
            many = count(progress.num_bad, "evaluation")
            return f"no improvement in {many}"
        return None

    def wants_evaluation(self, progress: Progress) -> bool:
        """Whether an evaluation is due after the step that has led to ``progress``, unless it was
        the last: then one is due anyway.
        """
        at_end = progress.offset == 0 and progress.epoch > 0
        every = self.eval_frequency
        return at_end and every > 0 and progress.epoch % every == 0


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
