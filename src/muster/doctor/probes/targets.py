"""The devices a probe works on, and the clock that fits each kind."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch


def parse_targets(kind: str, numbers: str) -> list[torch.device]:
    """``cuda`` and ``0,2`` as devices. Several CPUs are all the same one, which is for tests.

    >>> parse_targets("cpu", "0,1")
    [device(type='cpu'), device(type='cpu')]
    """
    indices = [int(number) for number in numbers.split(",")]
    return [torch.device("cpu") if kind == "cpu" else torch.device(kind, at) for at in indices]


def synchronise(devices: Sequence[torch.device]) -> None:
    for device in devices:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)


def seconds_per_call(
    work: Callable[[], object], devices: Sequence[torch.device], *, budget_s: float
) -> float:
    """The median over a few rounds of the time per call of ``work``, which starts on ``devices``.

    One call warms up (libraries choose their kernels), then every round takes about a fifth of
    ``budget_s``; work is only waited for at the end of a round, so launches cost nothing.
    """
    work()
    synchronise(devices)
    once_s = _timed(work, devices, 1)
    num_calls = max(1, min(200, int(budget_s / 5 / max(once_s, 1e-7))))
    if once_s > budget_s:
        return once_s
    num_rounds = max(1, min(5, int(budget_s / (once_s * num_calls))))
    return median(_timed(work, devices, num_calls) for _ in range(num_rounds))


def _timed(work: Callable[[], object], devices: Sequence[torch.device], num_calls: int) -> float:
    began_s = time.perf_counter()
    for _ in range(num_calls):
        work()
    synchronise(devices)
    return (time.perf_counter() - began_s) / num_calls
