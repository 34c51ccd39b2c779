"""Where a training is: every counter in one record, which is what a checkpoint keeps."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from muster.rank.seeding import Position
from muster.train.losses import StepLoss


@dataclass(kw_only=True)
class Progress:
    """``step``: optimizer steps that were applied; ``attempts``: those and the skipped ones.

    ``samples`` counts all samples consumed so far. ``num_bad``: evaluations since the best one.
    ``loss_sum`` and ``loss_weight`` belong to the epoch ``loss_epoch`` alone.
    """

    step: int = 0
    attempts: int = 0
    samples: int = 0
    epoch: int = 0
    offset: int = 0
    best: float | None = None
    best_step: int | None = None
    num_bad: int = 0
    last_loss: float | None = None
    loss_epoch: int = 0
    loss_sum: float = 0.0
    loss_weight: float = 0.0
    trained_s: float = 0.0
    evaluations: list[dict[str, Any]] = field(default_factory=list)

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
        is_better = value == value and (
            self.best is None or (value > self.best if higher_is_better else value < self.best)
        )
        if is_better:
            self.best, self.best_step, self.num_bad = value, self.step, 0
        else:
            self.num_bad += 1
        return is_better

    def to_record(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_record(record: Mapping[str, Any]) -> Progress:
        return Progress(**record)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """When a training is over, in optimizer steps and epochs."""

    steps_per_epoch: int
    epochs: int
    max_steps: int | None
    patience: int | None
    eval_frequency: int

    @property
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
            return f"no improvement in {progress.num_bad} evaluations"
        return None

    def wants_evaluation(self, progress: Progress) -> bool:
        """Whether an evaluation is due after the step that has led to ``progress``."""
        at_end = progress.offset == 0 and progress.epoch > 0
        if self.is_over(progress) is not None:
            return True
        every = self.eval_frequency
        return at_end and every > 0 and progress.epoch % every == 0
