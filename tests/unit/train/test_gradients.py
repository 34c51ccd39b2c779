"""Gradients are those of one step, whatever the optimizer has of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.train.toy_tasks import Toy

from muster.rank.record import read_metrics
from muster.run.folder import RunFolder
from muster.train.config import TrainConfig
from muster.train.loop import train

#: One batch that is all of the data, so that every step sees the same.
CONFIG = TrainConfig(
    global_batch=8, epochs=4, max_grad_norm=1e9, eval_frequency=0, tensorboard=False
)


class Still(Toy):
    """Only its head has an optimizer, which does not move it."""

    def optimizer(
        self, model: torch.nn.Module, lr: float, weight_decay: float
    ) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.head.parameters(), lr=0.0)  # type: ignore[union-attr]


class Asked(torch.optim.SGD):
    """Counts how often it is asked to clear its gradients."""

    count = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        type(self).count += 1
        super().zero_grad(set_to_none)


class Asking(Toy):
    def optimizer(
        self, model: torch.nn.Module, lr: float, weight_decay: float
    ) -> torch.optim.Optimizer:
        return Asked(model.parameters(), lr=lr)


def norms(folder: Path, task: Toy) -> list[float]:
    train(task, CONFIG, RunFolder(folder), None, lambda line: None)
    lines = [*read_metrics(RunFolder(folder).metrics)]
    return [line["grad_norm"] for line in lines if line["kind"] == "train"]


def test_what_the_optimizer_does_not_have_is_not_added_up_over_steps(tmp_path: Path) -> None:
    """Otherwise the norm grows from step to step, and clipping shrinks the head's gradient."""
    first, *rest = norms(tmp_path, Still(samples=8, val=0))
    assert first > 0 and rest == [pytest.approx(first, rel=1e-9)] * 3


def test_an_optimizer_that_clears_in_its_own_way_is_asked(tmp_path: Path) -> None:
    Asked.count = 0
    norms(tmp_path, Asking(samples=8, val=0))
    assert Asked.count >= 4


def test_adamw_makes_one_pass_where_it_can() -> None:
    def is_fused(dtype: Any) -> Any:
        model = torch.nn.Linear(2, 2, dtype=dtype)
        return Toy().optimizer(model, 0.1, 0.0).param_groups[0]["fused"]

    assert is_fused(torch.float32) is True and is_fused(torch.float64) is True
    assert not is_fused(torch.complex64)
