"""Learning-rate schedules against torch's own, at every step."""

from __future__ import annotations

import pytest
import torch

from muster_recipes.ssm.gd import GdSettings, learning_rate


@pytest.mark.parametrize("epochs", [3, 30, 999])
@pytest.mark.parametrize("name", ["none", "step", "exponential", "cosine"])
def test_schedules_are_those_of_torch(name: str, epochs: int) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.3)
    schedule = {
        "none": lambda: torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0),
        "step": lambda: torch.optim.lr_scheduler.StepLR(optimizer, epochs // 3, gamma=0.1),
        "exponential": lambda: torch.optim.lr_scheduler.ExponentialLR(
            optimizer, gamma=0.01 ** (1 / epochs)
        ),
        "cosine": lambda: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs),
    }[name]()
    settings = GdSettings(
        lr=0.3, epochs=epochs, init_scale=1.0, optimizer="sgd", scheduler=name, init_type="regular"
    )
    for step in range(epochs):
        expected = optimizer.param_groups[0]["lr"]
        assert learning_rate(settings, step) == pytest.approx(expected, rel=1e-9), step
        optimizer.step()
        schedule.step()
