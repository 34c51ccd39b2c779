"""Rates are those of a clock on the wall, also where the host is steps ahead of its device."""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.train.toy_tasks import Toy

from muster.rank.meter import Meter
from muster.run.folder import RunFolder
from muster.train.config import TrainConfig
from muster.train.loop import train
from muster.train.progress import LossTrail, StepLoss

BATCH, STEP_S, HOST_S = 64, 0.02, 0.001


class Device:
    """A GPU that does in order what it is given, and a host that waits for it when it wants to."""

    def __init__(self) -> None:
        self.now_s = self._free_s = 0.0
        self._ends: deque[float] = deque()

    def launch(self) -> None:
        self.now_s += HOST_S
        self._free_s = max(self._free_s, self.now_s) + STEP_S
        self._ends.append(self._free_s)

    def wait(self, most_behind: int) -> None:
        while len(self._ends) > most_behind:
            self.now_s = max(self.now_s, self._ends.popleft())


@pytest.mark.parametrize("lag", [0, 2, 5])
@pytest.mark.parametrize("steps_per_epoch", [3, 21])
def test_a_rate_is_what_was_computed_over_the_wall_clock(lag: int, steps_per_epoch: int) -> None:
    device, num_epochs = Device(), 120 // steps_per_epoch
    meter = Meter(clock=lambda: device.now_s)
    evaluating_s = 0.0
    for _ in range(num_epochs):
        for _ in range(steps_per_epoch):
            meter.begin_step()
            device.launch()
            device.wait(lag)
            meter.end_step(BATCH)
            device.now_s += HOST_S  # what is written down of a step
        device.wait(0)
        meter.pause()
        device.now_s += 1.0
        evaluating_s += 1.0
    num_steps = num_epochs * steps_per_epoch
    true = BATCH * num_steps / (device.now_s - evaluating_s)
    assert meter.total.steps == num_steps - 3
    assert meter.total.samples_per_s is not None
    # Above: the warm-up costs what other steps cost. Below: its last steps end after it.
    assert 0.95 * true < meter.total.samples_per_s <= 1.01 * true
    assert meter.total.samples_per_s <= BATCH / STEP_S


def test_a_checkpoint_counts_and_its_share_is_known() -> None:
    clock = iter([float(second) for second in range(100)])
    meter = Meter(warmup=0, clock=lambda: next(clock))
    meter.begin_step()  # 0
    meter.end_step(1)  # 1
    with meter.saving():  # 2 to 3
        pass
    meter.pause()  # 4: and from here on nothing counts
    with meter.saving():  # 5 to 6, right after an evaluation
        pass
    meter.begin_step()  # 7
    meter.end_step(1)  # 8
    assert (meter.total.seconds, meter.total.checkpoint_s) == (7.0, 2.0)
    assert meter.step.seconds == 1.0


class Behind(LossTrail):
    """The losses of a device that is two steps behind and takes 50 ms for each."""

    step_s = 0.05

    def __init__(self, device: torch.device) -> None:
        super().__init__(torch.device("cuda"))
        self._free_s = 0.0
        self._ends: deque[float] = deque()

    def push(self, attempt: int, epoch: int, total: Any, weight: float) -> StepLoss | None:
        self._free_s = max(self._free_s, time.perf_counter()) + self.step_s
        self._ends.append(self._free_s)
        return super().push(attempt, epoch, float(total), weight)

    def _pop(self) -> StepLoss:
        time.sleep(max(0.0, self._ends.popleft() - time.perf_counter()))
        return super()._pop()


def test_a_training_reports_no_more_than_its_device_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four steps per epoch, of which two are waited for before each evaluation and checkpoint."""
    monkeypatch.setattr("muster.train.loop.LossTrail", Behind)
    config = TrainConfig(global_batch=8, epochs=4, max_grad_norm=1.0, tensorboard=False)
    folder = RunFolder(tmp_path)
    results = train(Toy(samples=32, val=8), config, folder, None, lambda line: None)
    assert results is not None
    measured = results["measured"]
    assert measured["steps"] == 4 * 4 - 3
    beside_checkpoints = measured["samples_per_s"] / (1 - measured["checkpoint_share"])
    assert beside_checkpoints <= 8 / Behind.step_s
