"""How far the training of an agent is, when it is over, and its episodes; kept in checkpoints."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from muster.rank.state import Standing
from muster.rl.config import PpoConfig
from muster.rl.losses import discounted_running


@dataclass(kw_only=True)
class Running:
    """The episodes that are under way; rows [num_envs]. ``is_new``: none has finished yet."""

    total: Tensor
    length: Tensor
    is_new: Tensor

    @staticmethod
    def fresh(num_envs: int, device: torch.device) -> Running:
        return Running(
            total=torch.zeros(num_envs, dtype=torch.float64, device=device),
            length=torch.zeros(num_envs, dtype=torch.int64, device=device),
            is_new=torch.ones(num_envs, dtype=torch.bool, device=device),
        )


def count_episodes(
    running: Running, rewards: Tensor, ended: Tensor, valid: Tensor, extras: Mapping[str, Tensor]
) -> Tensor:
    """Sums over the episodes that end in a rollout; arguments are [T, N], ``running`` is updated.

    Returns float64 [4 + extras]: environments that have not finished any, episodes, sum of
    returns, sum of lengths, then the sum of each extra in the order of their names. Ranks add
    these.
    """
    is_over = ended & valid
    totals, running.total = discounted_running(
        rewards.double(), running.total, is_over, valid, gamma=1.0
    )
    lengths, length = discounted_running(
        valid.double(), running.length.double(), is_over, valid, gamma=1.0
    )
    running.length = length.long()
    running.is_new = running.is_new & ~is_over.any(0)
    known = [torch.ones_like(totals), totals, lengths]
    known += [extras[name].double() for name in sorted(extras)]
    sums = [torch.where(is_over, values, 0.0).sum() for values in known]
    return torch.stack([running.is_new.sum().double(), *sums])


class Window:
    """Means over the latest finished episodes, at least ``size`` of them once there are so many.

    There are none before every environment has finished one: until then the short ones are
    over-represented, because they are the first to end.
    """

    def __init__(self, extras: Sequence[str], size: int = 100) -> None:
        self._names = ["return", "length", *sorted(extras)]
        self._size = size
        self._kept: deque[list[float]] = deque()
        self._is_open = False

    def add(self, sums: Sequence[float]) -> int:
        """Add the sums of ``count_episodes`` over all ranks; returns the number of episodes."""
        num_new, *rest = sums
        self._is_open = self._is_open or num_new == 0
        self._kept.append(list(rest))
        while sum(s[0] for s in list(self._kept)[1:]) >= self._size:
            self._kept.popleft()
        return round(rest[0])

    def means(self) -> dict[str, float]:
        count = sum(sums[0] for sums in self._kept)
        if not self._is_open or count == 0:
            return {}
        return {
            name: sum(sums[1 + place] for sums in self._kept) / count
            for place, name in enumerate(self._names)
        }

    def to_record(self) -> dict[str, object]:
        return {"kept": list(self._kept), "is_open": self._is_open}

    def restore(self, record: Mapping[str, object]) -> None:
        kept = record["kept"]
        assert isinstance(kept, list)
        self._kept = deque(kept)
        self._is_open = bool(record["is_open"])


_SMOOTHING = 0.4
#: So many in a row have to be no better before patience ends a training.
_LEAST_EVALUATIONS = 5


@dataclass(kw_only=True)
class AgentProgress(Standing):
    """``steps`` and ``episodes`` are those of all environments of all ranks.

    ``smoothed``: moving average of the validation return; ``smoothed_best``, ``episodes_at_best``
    and ``evaluations_since_best`` decide about patience. ``best`` is of the monitored number.
    """

    updates: int = 0
    steps: int = 0
    episodes: int = 0
    smoothed: float | None = None
    smoothed_best: float | None = None
    episodes_at_best: int = 0
    evaluations_since_best: int = 0

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
        return self.improves(value, self.steps, higher_is_better=higher_is_better)

    def fraction(self, config: PpoConfig) -> float:
        """The part of the training that is done, in [0, 1]; schedules follow it."""
        parts = [0.0]
        if config.num_steps is not None:
            parts.append(self.steps / config.num_steps)
        if config.num_episodes is not None:
            parts.append(self.episodes / config.num_episodes)
        return min(1.0, max(parts))

    def over(self, config: PpoConfig) -> str | None:
        """Why the training is over, or None."""
        if config.num_steps is not None and self.steps >= config.num_steps:
            return f"--num-steps {config.num_steps}"
        if config.num_episodes is not None and self.episodes >= config.num_episodes:
            return f"--num-episodes {config.num_episodes}"
        idle, many = self.episodes - self.episodes_at_best, self.evaluations_since_best
        # Environments may all end their episodes in one update: a jump over --patience between
        # two evaluations is no evidence.
        if config.patience is not None and idle >= config.patience and many >= _LEAST_EVALUATIONS:
            return f"no better smoothed validation return in {idle} episodes, {many} evaluations"
        return None

    def wants_evaluation(self, config: PpoConfig) -> bool:
        """Whether an evaluation is due after the latest update."""
        if self.over(config) is not None:
            return True
        return config.eval_frequency > 0 and self.updates % config.eval_frequency == 0


def between(start: float, end: float | None, fraction: float) -> float:
    """A linear schedule; constant without an ``end``."""
    return start if end is None else start + (end - start) * fraction
