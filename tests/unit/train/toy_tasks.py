"""Small tasks with every kind of trouble, for ranks that other processes run."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from muster.gang.beacon import BEACON
from muster.train.task import Loss, Task

HUGE = 1 << 50
NUM_PARAMETERS = 113


class Points(Dataset[Any]):
    """Points of a fixed regression problem; with ``noise`` every fetch draws anew."""

    def __init__(self, count: int, seed: int, toy: Toy) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(count, 3, generator=generator, dtype=torch.float64)
        noise = torch.randn(count, generator=generator, dtype=torch.float64)
        self.y = torch.sin(self.x.sum(1)) + 0.1 * noise
        self.toy = toy

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        toy = self.toy
        if toy.none_every and index % toy.none_every == 1:
            return None
        if toy.none_below is not None and index < toy.none_below:
            return None
        x = self.x[index]
        if toy.noise:
            x = x + toy.noise * torch.randn(3, dtype=torch.float64)
            x = x + toy.noise * float(numpy.random.standard_normal())
        kind = getattr(torch, toy.dtype)
        return x.to(kind), self.y[index].to(kind), index


class Net(nn.Module):
    def __init__(self, toy: Toy) -> None:
        super().__init__()
        kind = getattr(torch, toy.dtype)
        self.layers = nn.ModuleList([nn.Linear(3, 8, dtype=kind), nn.Linear(8, 8, dtype=kind)])
        self.norm = nn.BatchNorm1d(8, dtype=kind) if toy.batchnorm else nn.Identity()
        self.dropout = nn.Dropout(toy.dropout)
        self.head = nn.Linear(8, 1, dtype=kind)
        if toy.unused:
            self.spare = nn.Linear(3, 2, dtype=kind)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(self.dropout(self.norm(x))).sum(-1)


class _Explode(torch.autograd.Function):
    """Runs out of memory in the backward."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, grad: Tensor) -> Tensor:
        torch.empty(HUGE, dtype=torch.uint8)
        return grad


@dataclass(kw_only=True)
class Toy(Task):
    """Regression on a few points.

    ``trouble`` happens once: in micro-batch ``micro`` of step ``at`` (both counted from 0) on rank
    ``on`` (-1: on all). ``fits``: more samples than that never fit into memory there.
    """

    samples: int = 37
    val: int = 11
    dtype: str = "float64"
    dropout: float = 0.0
    noise: float = 0.0
    batchnorm: bool = False
    unused: bool = False
    none_every: int = 0
    none_below: int | None = None
    tokens: bool = False
    fits: int = 0
    trouble: str = ""
    at: int = 0
    micro: int = 0
    on: int = -1

    monitor = "loss"

    def model(self) -> nn.Module:
        return Net(self)

    def dataset(self, split: str) -> Dataset[Any] | None:
        if split == "train":
            return Points(self.samples, 1, self)
        return Points(self.val, 2, self) if split == "val" and self.val else None

    def loss(self, model: nn.Module, batch: Any) -> Tensor | Loss:
        x, y, index = batch
        due = self._is_due()
        if self.fits and len(x) > self.fits and self._is_here():
            torch.empty(HUGE, dtype=torch.uint8)
        if due:
            self._cause(model)
        out = model(x)
        if due and self.trouble == "backward":
            out = _Explode.apply(out)
        losses = (out.to(y.dtype) - y) ** 2
        if due and self.trouble == "deep":
            first = next(model.parameters())
            first.register_hook(self._explode_once)
        if due and self.trouble == "nan":
            losses = losses * float("nan")
        if self.tokens:
            weights = (index % 4 + 1).to(losses.dtype)
            return Loss((losses * weights).sum(), weights.sum())
        return losses

    def score(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        x, y, index = batch
        return {"loss": (model(x) - y).double() ** 2, "index": index}

    def summarise(self, columns: Any) -> dict[str, Any]:
        return {
            "loss": float(columns["loss"].mean()),
            "seen": [int(i) for i in columns["index"]],
        }

    def _is_due(self) -> bool:
        if BEACON.phase != "forward" or BEACON.step != self.at or not self._is_here():
            return False
        self.calls = getattr(self, "calls", -1) + 1
        if self.trouble == "never":
            return True
        return self.calls == self.micro

    def _explode_once(self, grad: Tensor) -> None:
        if not hasattr(self, "exploded"):
            self.exploded = 1
            torch.empty(HUGE, dtype=torch.uint8)

    def _is_here(self) -> bool:
        return self.on in (-1, int(os.environ.get("RANK", "0")))

    def _cause(self, model: nn.Module) -> None:
        if self.trouble == "stop":
            os.kill(os.getpid(), signal.SIGTERM)
        if self.trouble in ("forward", "never"):
            torch.empty(HUGE, dtype=torch.uint8)
        if self.trouble == "drift":
            with torch.no_grad():
                next(model.parameters()).add_(1.0)


@dataclass(kw_only=True)
class GoesAround(Toy):
    """Calls the module that it has kept instead of the one that it is given."""

    def model(self) -> nn.Module:
        self.kept = Net(self)
        return self.kept

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return (self.kept(batch[0]) - batch[1]) ** 2


@dataclass(kw_only=True)
class GoesHalfAround(Toy):
    """Calls the given model, and a part of it once more by itself."""

    def model(self) -> nn.Module:
        self.kept = Net(self)
        return self.kept

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y, _ = batch
        with torch.no_grad():
            offset = model(x)
        return (offset + self.kept.head(torch.tanh(self.kept.layers[0](x))).squeeze(-1) - y) ** 2


@dataclass(kw_only=True)
class MeanLoss(Toy):
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return ((model(batch[0]) - batch[1]) ** 2).mean()


@dataclass(kw_only=True)
class MeanScore(Toy):
    def score(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"loss": ((model(batch[0]) - batch[1]) ** 2).mean()}


@dataclass(kw_only=True)
class NoSuchMetric(Toy):
    monitor = "acuracy"


@dataclass(kw_only=True)
class SecretlyBf16(Toy):
    """Notes the type that the first layer really computes in."""

    dtype: str = "float32"

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        hidden: list[Tensor] = []
        head = next(m for m in model.modules() if isinstance(m, Net)).head
        handle = head.register_forward_hook(lambda module, args, out: hidden.append(out))
        losses = (model(batch[0]).float() - batch[1]) ** 2
        handle.remove()
        self.seen_type = str(hidden[0].dtype)
        return losses


@dataclass(kw_only=True)
class GatheredTypes(Toy):
    """Notes the types of a weight as a layer uses it, and as the optimizer updates it."""

    dtype: str = "float32"

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        head = next(m for m in model.modules() if isinstance(m, Net)).head
        self.updated_type = str(head.weight.dtype)

        def note(module: nn.Linear, args: Any) -> None:
            self.used_type = str(module.weight.dtype)

        handle = head.register_forward_pre_hook(note)
        losses = (model(batch[0]).float() - batch[1]) ** 2
        handle.remove()
        return losses


@dataclass(kw_only=True)
class InfiniteGradient(Toy):
    """A finite loss whose gradient is not, at step ``at``: the square root of zero."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        losses = (model(batch[0]) - batch[1]) ** 2
        if BEACON.step == self.at and BEACON.phase == "forward":
            losses = losses + torch.sqrt(losses * 0.0)
        return losses


@dataclass(kw_only=True)
class Overflows(Toy):
    """With fp16 the gradient of step ``overflow`` overflows on rank 1, the first time."""

    dtype: str = "float32"
    overflow: int = 2

    def loss(self, model: nn.Module, batch: Any) -> Any:
        losses: Any = super().loss(model, (batch[0], batch[1], batch[2]))
        here = BEACON.step == self.overflow and BEACON.phase == "forward"
        if here and os.environ["RANK"] == "1" and not hasattr(self, "did"):
            self.did = 1
            losses = _Infinite.apply(losses)
        return losses


class _Infinite(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, grad: Tensor) -> Tensor:
        return torch.full_like(grad, float("inf"))


@dataclass(kw_only=True)
class Counted(Toy):
    """Counts, with torch's own profiler, the reductions between two forwards of step 4 and 5."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor | Loss:
        from torch.profiler import ProfilerActivity, profile

        if BEACON.phase == "forward" and BEACON.step == 4 and not hasattr(self, "profile"):
            self.profile = profile(activities=[ProfilerActivity.CPU], record_shapes=True)
            self.profile.__enter__()
        if BEACON.phase == "forward" and BEACON.step == 5 and not hasattr(self, "reductions"):
            self.profile.__exit__(None, None, None)
            self.reductions = sum(
                event.name == "gloo:all_reduce" and event.input_shapes == [[NUM_PARAMETERS]]
                for event in self.profile.events()
            )
        return super().loss(model, batch)


class NestedNet(nn.Module):
    """Lists of parts within lists of parts, as in models with stages."""

    def __init__(self) -> None:
        super().__init__()
        kind = torch.float64
        stages = [nn.ModuleList([nn.Linear(3, 3, dtype=kind) for _ in range(2)]) for _ in range(2)]
        self.stages = nn.ModuleList(stages)
        self.head = nn.Linear(3, 1, dtype=kind)

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            for layer in stage:
                x = torch.tanh(layer(x))
        return self.head(x).sum(-1)


@dataclass(kw_only=True)
class Nested(Toy):
    """Writes down at the end what it has learnt."""

    def model(self) -> nn.Module:
        return NestedNet()

    def finish(self, model: nn.Module, folder: str) -> None:
        values = {name: tensor.tolist() for name, tensor in model.state_dict().items()}
        Path(folder, "learnt.json").write_text(json.dumps(values))
