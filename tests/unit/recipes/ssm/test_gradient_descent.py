"""Batched gradient descent against autograd, torch's own optimisers and the specification."""

from __future__ import annotations

import math

import pytest
import torch

from muster_recipes.ssm.gd import (
    GdCell,
    GdSettings,
    _gradient,
    initial_values,
    learning_rate,
    train,
)
from muster_recipes.ssm.problem import Problem

H = Problem((0.5,), ((0.0,) * 4,)).h


def settings(**changes: object) -> GdSettings:
    values: dict[str, object] = {
        "lr": 1e-3,
        "epochs": 200,
        "init_scale": 1e-2,
        "optimizer": "adam",
        "scheduler": "none",
        "init_type": "regular",
    }
    return GdSettings(**{**values, **changes})  # type: ignore[arg-type]


def cell(dim: int = 6, seed: int = 1, *w: tuple[float, ...]) -> GdCell:
    return GdCell(H, w or ((1.0, -0.5, 0.3, 2.0),), dim, seed)


def loss_of(a: torch.Tensor, one: GdCell) -> torch.Tensor:
    """The training loss written down directly."""
    powers = torch.stack([(a**m).sum() for m in range(1, len(one.h) + 1)])
    error = powers - torch.tensor(one.h, dtype=torch.float64)
    return (torch.tensor(one.w, dtype=torch.float64) @ error).square().mean()


def straightforward(one: GdCell, chosen: GdSettings) -> float:
    """One student with torch.optim, step by step."""
    a = initial_values(one, chosen).clone().requires_grad_()
    kind = torch.optim.Adam if chosen.optimizer == "adam" else torch.optim.SGD
    optimizer = kind([a], lr=chosen.lr)
    for step in range(chosen.epochs):
        optimizer.param_groups[0]["lr"] = learning_rate(chosen, step)
        optimizer.zero_grad()
        loss_of(a, one).backward()
        optimizer.step()
    return float(loss_of(a.detach(), one))


def test_the_gradient_is_autograds() -> None:
    one = cell(5, 3, (1.0, -0.5, 0.3, 2.0), (0.2, 0.1, -1.0, 0.4))
    a = torch.linspace(-0.9, 0.8, 5, dtype=torch.float64).requires_grad_()
    loss_of(a, one).backward()
    w = torch.tensor([one.w], dtype=torch.float64)
    powers = torch.arange(1, 5, dtype=torch.float64)
    h = torch.tensor([one.h], dtype=torch.float64)
    found = _gradient(a.detach()[None], h, w, w * powers)[0]
    assert a.grad is not None
    torch.testing.assert_close(found, a.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("scheduler", ["none", "step", "exponential", "cosine"])
def test_training_equals_torchs_optimisers(optimizer: str, scheduler: str) -> None:
    chosen = settings(optimizer=optimizer, scheduler=scheduler, lr=5e-3)
    one = cell()
    ((train_loss, _),) = train([one], chosen)
    assert train_loss == pytest.approx(straightforward(one, chosen), rel=1e-9)


def test_a_cell_does_not_depend_on_its_neighbours() -> None:
    cells = [cell(4, 1), cell(9, 2), cell(9, 3), cell(1, 4)]
    together = train(cells, settings())
    alone = [train([one], settings())[0] for one in cells]
    for one, other in zip(together, alone, strict=True):
        assert one == pytest.approx(other, rel=1e-10)


def test_a_cell_that_diverges_leaves_its_neighbours_alone() -> None:
    wild = GdCell(H, ((1e9, 1e9, 1e9, 1e9),), 4, 1)
    chosen = settings(optimizer="sgd", lr=1e-3)
    result = train([cell(4, 2), wild], chosen)
    assert not math.isfinite(result[1][0])
    assert result[0] == pytest.approx(train([cell(4, 2)], chosen)[0], rel=1e-10)


def test_losses_are_those_after_the_last_step() -> None:
    one = cell()
    before = float(loss_of(initial_values(one, settings()), one))
    ((after, _),) = train([one], settings(epochs=1))
    assert after < before


def test_initial_values() -> None:
    one = cell(1000, 7)
    regular = initial_values(one, settings(init_scale=0.1))
    assert float(regular.std()) == pytest.approx(0.1, rel=0.1)
    torch.testing.assert_close(
        initial_values(one, settings(init_scale=0.1, init_type="near_one")), 1.0 + regular
    )
    torch.testing.assert_close(
        initial_values(one, settings(init_scale=0.1, init_type="positive")), regular.abs()
    )
    large = initial_values(one, settings(init_scale=0.1, init_type="one_large"))
    assert float(large.abs().max()) == pytest.approx(5 * float(regular.abs().max()))
    assert int((large != regular).sum()) == 1
