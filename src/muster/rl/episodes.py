"""Counting finished episodes: sums on the device, means over all ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


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

    def to_tensors(self) -> dict[str, Tensor]:
        return {"total": self.total, "length": self.length, "is_new": self.is_new}


def count_episodes(
    running: Running, rewards: Tensor, ended: Tensor, valid: Tensor, extras: Mapping[str, Tensor]
) -> Tensor:
    """Sums over the episodes that end in a rollout; all arguments [T, N], ``running`` goes on.

    Returns float64 [4 + extras]: environments that have not finished any, episodes, sum of
    returns, sum of lengths, then the sum of each extra in the order of their names. Ranks add
    these.
    """
    sums = torch.zeros(3 + len(extras), dtype=torch.float64, device=rewards.device)
    names = sorted(extras)
    rewards, is_over = rewards.double() * valid, ended & valid
    for t in range(len(rewards)):
        over = is_over[t]
        running.total = running.total + rewards[t]
        running.length = running.length + valid[t]
        told = [torch.ones_like(running.total), running.total, running.length.double()]
        told += [extras[name][t].double() for name in names]
        sums += torch.where(over, torch.stack(told), 0.0).sum(1)
        running.total = torch.where(over, 0.0, running.total)
        running.length = torch.where(over, 0, running.length)
        running.is_new = running.is_new & ~over
    return torch.cat([running.is_new.sum().double().unsqueeze(0), sums])


class Window:
    """Means over the latest finished episodes, at least ``size`` of them where there are.

    Nothing is told before every environment has finished one: until then the short ones are
    over-represented, because they are the first to end.
    """

    def __init__(self, extras: Sequence[str], size: int = 100) -> None:
        self._names = ["return", "length", *sorted(extras)]
        self._size = size
        self._kept: deque[list[float]] = deque()
        self._is_open = False

    def add(self, sums: Sequence[float]) -> int:
        """What ``count_episodes`` gave, added over the ranks; returns the number of episodes."""
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
