"""The loss of each step as a number, without making the GPU wait for it."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor


class StepLoss(NamedTuple):
    """Sum of losses and of their weights in one attempt at a step, of one rank or of all."""

    attempt: int
    epoch: int
    total: float
    weight: float

    @property
    def mean(self) -> float:
        return self.total / self.weight


class _Waiting(NamedTuple):
    attempt: int
    epoch: int
    total: Tensor | float
    weight: float
    event: torch.cuda.Event | None


class LossTrail:
    """Takes sums as tensors and gives them as numbers: at once on a CPU, two steps later on a GPU.

    By then the copy is there, so that nothing waits. ``flush`` gives the rest.
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
        if self.lag == 0:
            return StepLoss(attempt, epoch, float(total), weight)
        if isinstance(total, Tensor):
            host = torch.empty((), dtype=total.dtype, pin_memory=True)
            host.copy_(total, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._waiting.append(_Waiting(attempt, epoch, host, weight, event))
        else:
            self._waiting.append(_Waiting(attempt, epoch, total, weight, None))
        return self._pop() if len(self._waiting) > self.lag else None

    def drop(self) -> None:
        """Forget the newest: its step is made again."""
        if self._waiting:
            self._waiting.pop()

    def flush(self) -> list[StepLoss]:
        return [self._pop() for _ in range(len(self._waiting))]

    def _pop(self) -> StepLoss:
        attempt, epoch, total, weight, event = self._waiting.popleft()
        if event is not None:
            event.synchronize()
        return StepLoss(attempt, epoch, float(total), weight)
