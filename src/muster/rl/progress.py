"""Where a training of an agent is, and when it is over: what a checkpoint keeps as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from muster.rl.config import PpoConfig

_SMOOTHING = 0.4
#: So many in a row have to be no better before patience ends a training.
_LEAST_EVALUATIONS = 5


@dataclass(kw_only=True)
class AgentProgress:
    """``steps`` and ``episodes`` are those of all environments of all ranks.

    ``smoothed``: moving average of the validation return; ``smoothed_best``, ``episodes_at_best``
    and ``evaluations_since_best`` decide about patience. ``best`` is of the monitored number.
    """

    updates: int = 0
    steps: int = 0
    episodes: int = 0
    best: float | None = None
    best_step: int | None = None
    smoothed: float | None = None
    smoothed_best: float | None = None
    episodes_at_best: int = 0
    evaluations_since_best: int = 0
    evaluations: list[dict[str, Any]] = field(default_factory=list)

    def judge(self, value: float, total: float, *, higher_is_better: bool) -> bool:
        """Take note of an evaluation: the monitored ``value`` and the mean return ``total``.

        True when ``value`` is the best so far; NaN never is.
        """
        before = self.smoothed
        if total == total:
            self.smoothed = total if before is None else before + _SMOOTHING * (total - before)
        if self.smoothed is not None and (
            self.smoothed_best is None or self.smoothed > self.smoothed_best
        ):
            self.smoothed_best, self.episodes_at_best = self.smoothed, self.episodes
            self.evaluations_since_best = 0
        else:
            self.evaluations_since_best += 1
        is_better = value == value and (
            self.best is None or (value > self.best if higher_is_better else value < self.best)
        )
        if is_better:
            self.best, self.best_step = value, self.steps
        return is_better

    def to_record(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_record(record: Mapping[str, Any]) -> AgentProgress:
        return AgentProgress(**record)


@dataclass(frozen=True, kw_only=True)
class AgentLimits:
    """When a training is over."""

    num_steps: int | None
    num_episodes: int | None
    patience: int | None
    eval_frequency: int

    @staticmethod
    def of(config: PpoConfig) -> AgentLimits:
        return AgentLimits(
            num_steps=config.num_steps,
            num_episodes=config.num_episodes,
            patience=config.patience,
            eval_frequency=config.eval_frequency,
        )

    def fraction(self, progress: AgentProgress) -> float:
        """How much of the training is behind, in [0, 1]; schedules follow it."""
        parts = [0.0]
        if self.num_steps is not None:
            parts.append(progress.steps / self.num_steps)
        if self.num_episodes is not None:
            parts.append(progress.episodes / self.num_episodes)
        return min(1.0, max(parts))

    def is_over(self, progress: AgentProgress) -> str | None:
        """Why the training is over, or None."""
        if self.num_steps is not None and progress.steps >= self.num_steps:
            return f"--num-steps {self.num_steps}"
        if self.num_episodes is not None and progress.episodes >= self.num_episodes:
            return f"--num-episodes {self.num_episodes}"
        idle = progress.episodes - progress.episodes_at_best
        many = progress.evaluations_since_best
        # Environments may all end their episodes in one update: a jump over --patience between
        # two evaluations is no evidence.
        if self.patience is not None and idle >= self.patience and many >= _LEAST_EVALUATIONS:
            return f"no better smoothed validation return in {idle} episodes, {many} evaluations"
        return None

    def wants_evaluation(self, progress: AgentProgress) -> bool:
        """Whether an evaluation is due after the update that has led to ``progress``."""
        if self.is_over(progress) is not None:
            return True
        return self.eval_frequency > 0 and progress.updates % self.eval_frequency == 0


def between(start: float, end: float | None, fraction: float) -> float:
    """A linear schedule; constant without an ``end``."""
    return start if end is None else start + (end - start) * fraction
