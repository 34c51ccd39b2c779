"""Losses that arrive late are of the attempt they say, on every rank."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from muster.base.codec import decode, to_json
from muster.rank.meter import Meter
from muster.rank.record import Record, read_metrics
from muster.run.folder import RunFolder
from muster.train.config import TrainConfig
from muster.train.progress import LossTrail, Progress, StepLoss
from muster.train.reporting import StepLines


def test_on_a_cpu_a_loss_is_there_at_once() -> None:
    trail = LossTrail(torch.device("cpu"))
    assert trail.push(3, 1, torch.tensor(1.5), 2.0) == (3, 1, 1.5, 2.0)
    assert trail.flush() == []


def late() -> LossTrail:
    """As for a GPU, with numbers in place of tensors that only a GPU can hold."""
    trail = LossTrail(torch.device("cuda"))
    assert trail.lag == 2
    return trail


def test_later_they_come_in_order_and_the_rest_at_a_flush() -> None:
    trail = late()
    found = [trail.push(attempt, 0, float(attempt), 1.0) for attempt in range(5)]
    assert [known.attempt if known else None for known in found] == [None, None, 0, 1, 2]
    assert [known.attempt for known in trail.flush()] == [3, 4]


def test_a_rank_without_samples_stays_in_step_with_the_others() -> None:
    ours, theirs = late(), late()
    for attempt in range(6):
        a = ours.push(attempt, 0, 2.0, 1.0)
        b = theirs.push(attempt, 0, 0.0, 0.0)
        assert (a is None) == (b is None)
        assert a is None or b is None or a.attempt == b.attempt


@pytest.mark.parametrize("at", [0, 1, 4])
def test_an_attempt_that_is_made_again_counts_once(at: int) -> None:
    trail, found = late(), []
    for attempt in range(7):
        known = trail.push(attempt, 0, 1.0, 1.0)
        found += [known.attempt] if known else []
        if attempt == at:
            trail.drop()
            known = trail.push(attempt, 0, 1.0, 1.0)
            found += [known.attempt] if known else []
    found += [known.attempt for known in trail.flush()]
    assert found == list(range(7))


def test_an_epochs_loss_is_its_mean_over_the_terms_also_where_losses_come_late() -> None:
    """Epoch 0: 3 x 2.0 and 1 x 6.0; the first of epoch 1 is known before it has been evaluated."""
    progress = Progress()
    assert progress.epoch_loss is None
    progress.add_loss(StepLoss(attempt=0, epoch=0, total=6.0, weight=3.0))
    progress.add_loss(StepLoss(attempt=1, epoch=0, total=6.0, weight=1.0))
    assert progress.epoch_loss == 3.0
    assert progress.last_loss == 6.0
    again = decode(Progress, json.loads(to_json(progress)))
    for each in (progress, again):
        each.add_loss(StepLoss(attempt=2, epoch=1, total=1.0, weight=4.0))
        assert each.epoch_loss == 0.25


def test_a_line_has_the_norm_of_its_step_also_where_its_loss_comes_late(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    record = Record(folder, 0, with_tensorboard=False)
    lines, progress = StepLines(record), Progress()
    run: Any = SimpleNamespace(
        progress=progress, config=TrainConfig(), contract=SimpleNamespace(lr=0.1), meter=Meter()
    )
    for attempt, norm in enumerate((2.5, 3.5)):
        progress.step = progress.attempts = attempt + 1
        lines.add(run, 1.0, torch.tensor(norm))
    lines.write([StepLoss(attempt, 0, total=6.0, weight=3.0) for attempt in range(2)])
    record.close()
    found = [(line["loss"], line["grad_norm"]) for line in read_metrics(folder.metrics)]
    assert found == [(2.0, 2.5), (2.0, 3.5)]
