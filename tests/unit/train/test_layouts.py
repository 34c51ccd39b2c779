"""Parameters that do not lie in memory in the order of their indices are trained all the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemWriter, save

from muster.rank.checkpoint_files import load_state, model_tensors, optimizer_tensors
from muster.train.task import Task


class Columns(nn.Module):
    """Its weight is every second column of a larger one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 12)[:, ::2])

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t()


class Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 8).t())

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t()


def channels_last() -> nn.Module:
    model = nn.Sequential(nn.Unflatten(1, (6, 1, 1)), nn.Conv2d(6, 8, 1), nn.Flatten())
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


MODELS = {"columns": Columns, "transposed": Transposed, "channels last": channels_last}


def made(name: str, *, fused: bool | None = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = MODELS[name]()
    if fused is None:
        return model, Task.optimizer(None, model, 1e-2, 0.0)  # type: ignore[arg-type]
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0, fused=fused)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, begin: int, end: int) -> None:
    for step in range(begin, end):
        stream = torch.Generator().manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(4, 6, generator=stream)).square().mean().backward()
        optimizer.step()


def largest(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max((p - q).abs().max().item() for p, q in pairs)


@pytest.mark.parametrize("name", MODELS)
def test_the_default_optimizer_updates_each_weight_by_its_own_gradient(name: str) -> None:
    ours, optimizer = made(name)
    plain, textbook = made(name, fused=False)
    steps(ours, optimizer, 0, 3)
    steps(plain, textbook, 0, 3)
    assert largest(ours, plain) < 1e-6


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("fused", [None, True])
@pytest.mark.parametrize("name", ["transposed", "channels last"])
def test_moments_come_back_to_the_weights_that_they_are_of(
    name: str, fused: bool | None, tmp_path: Path
) -> None:
    """With a task's own optimizer, too, and with those that agents have had for long."""
    model, optimizer = made(name, fused=fused)
    steps(model, optimizer, 0, 3)
    state = {**model_tensors(model), **optimizer_tensors(model, optimizer)}
    plain = {key: tensor.detach() for key, tensor in state.items()}
    save(plain, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    again, restored = made(name, fused=fused)
    load_state(tmp_path, again, restored, {}, None)
    steps(model, optimizer, 3, 6)
    steps(again, restored, 3, 6)
    assert largest(model, again) == 0.0
