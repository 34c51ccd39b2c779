"""Models, optimizers and batches that are not the usual ones, as people bring them along."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from tests.unit.train.toy_tasks import Net, Points, Toy
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, default_collate

from muster.gang.beacon import BEACON

KIND = torch.float64


class TiedNet(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(3, 3, dtype=KIND)
        self.leave = nn.Linear(3, 3, dtype=KIND)
        self.leave.weight = self.enter.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(torch.tanh(self.enter(x))).sum(-1)


class FrozenNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kept = nn.Linear(3, 4, dtype=KIND).requires_grad_(False)
        self.head = nn.Linear(4, 1, dtype=KIND)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.kept(x))).sum(-1)


class OddNet(nn.Module):
    """Parameters that are a view of some columns, transposed, one number, and none at all."""

    def __init__(self) -> None:
        super().__init__()
        self.columns = nn.Parameter(torch.randn(4, 6, dtype=KIND)[:, ::2])
        self.turned = nn.Parameter(torch.randn(3, 4, dtype=KIND).t())
        self.scale = nn.Parameter(torch.tensor(0.5, dtype=KIND))
        self.empty = nn.Parameter(torch.zeros(0, 3, dtype=KIND))

    def forward(self, x: Tensor) -> Tensor:
        both = torch.tanh(x @ self.columns.t()) + x @ self.turned.t()
        return self.scale * both.sum(-1) + self.empty.sum()


class ComplexNet(nn.Module):
    """With complex weights, and buffers of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, dtype=torch.complex128))
        self.bias = nn.Parameter(torch.zeros((), dtype=KIND))
        self.register_buffer("turn", torch.polar(torch.ones(3), torch.arange(3.0)))
        self.register_buffer("is_used", torch.tensor([True, True, False]))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int16))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        turned = x.to(self.weight.dtype) * self.weight * self.turn * self.is_used
        return turned.sum(-1).abs() + self.bias


class SparseNet(nn.Module):
    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 3, sparse=sparse, dtype=KIND)

    def forward(self, x: Tensor) -> Tensor:
        words = (x.abs() * 4).long().clamp(max=7)
        return (self.table(words).sum(1) * x).sum(-1)


class ExpertNet(nn.Module):
    """Each sample has its expert: in some steps one of them has nothing to do."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(3, 1, dtype=KIND) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        found = torch.zeros(len(x), dtype=x.dtype)
        is_first = x[:, 0] > 1.0
        for expert, chosen in zip(self.experts, (is_first, ~is_first), strict=True):
            if chosen.any():
                found = found.masked_scatter(chosen, expert(x[chosen]).sum(-1))
        return found


class PausingNet(nn.Module):
    """Leaves a layer out in step 3, on rank 1."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(3, 1, dtype=KIND)
        self.mostly = nn.Linear(3, 1, dtype=KIND)

    def forward(self, x: Tensor) -> Tensor:
        is_out = BEACON.step == 3 and os.environ["RANK"] == "1"
        return self.always(x).sum(-1) + (0.0 if is_out else self.mostly(x).sum(-1))


class PausingLateNet(PausingNet):
    """Leaves a layer out in the second micro-batch of step 3, on rank 1."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += BEACON.step == 3
        is_out = self.calls == 2 and os.environ["RANK"] == "1"
        return self.always(x).sum(-1) + (0.0 if is_out else self.mostly(x).sum(-1))


class AveragedNet(nn.Module):
    """Keeps an average of its weights, which is what it is judged by."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 1, dtype=KIND)
        self.average = copy.deepcopy(self.inner).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.inner if self.training else self.average)(x).sum(-1)

    @torch.no_grad()
    def follow(self, *_: Any) -> None:
        for mean, value in zip(self.average.parameters(), self.inner.parameters(), strict=True):
            mean.lerp_(value, 0.3)


class CountingNet(nn.Module):
    """Counts its calls in a number that is no tensor, and scales by it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 1, dtype=KIND)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return self.inner(x).sum(-1) * (1 + self.calls / 100)

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


class CentredNet(nn.Module):
    """Keeps a running mean of what its own rank has seen, in a number that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 1, dtype=KIND)
        self.mean = 0.0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * float(x.mean())
        return self.inner(x - self.mean).sum(-1)

    def get_extra_state(self) -> Any:
        return {"mean": self.mean}

    def set_extra_state(self, state: Any) -> None:
        self.mean = state["mean"]


class RememberingNet(CentredNet):
    """Keeps all that it has seen, in a tensor that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen.append(float(x.mean()))
        return self.inner(x - sum(self.seen)).sum(-1)

    def get_extra_state(self) -> Any:
        return torch.tensor(self.seen, dtype=KIND)

    def set_extra_state(self, state: Any) -> None:
        self.seen = state.tolist()


class VersionedNet(CentredNet):
    """Says its version in its state, which nothing takes back, and counts nothing."""

    set_extra_state = nn.Module.set_extra_state

    def get_extra_state(self) -> Any:
        return {"version": 3, "made": object()}

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).sum(-1)


class UnstorableNet(CountingNet):
    def get_extra_state(self) -> Any:
        return {"calls": object()}

    def set_extra_state(self, state: Any) -> None:
        return


NETS: dict[str, Any] = {
    "tied": TiedNet,
    "frozen": FrozenNet,
    "odd": OddNet,
    "complex": ComplexNet,
    "sparse": lambda: SparseNet(sparse=True),
    "experts": ExpertNet,
    "pausing": PausingNet,
    "pausing-late": PausingLateNet,
    "averaged": AveragedNet,
    "counting": CountingNet,
    "centred": CentredNet,
    "remembering": RememberingNet,
    "versioned": VersionedNet,
    "unstorable": UnstorableNet,
}


class Growing(torch.optim.Optimizer):
    """Keeps what it has learnt about its rate where Prodigy and others do: in its groups."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "d": 1.0, "k": 0, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            group["d"] *= 1 + 1 / group["k"]
            for each in group["params"]:
                if each.grad is not None:
                    each -= group["lr"] * group["d"] * each.grad


class Settings:
    """Equal to nothing but itself."""


class Holding(Growing):
    """Was given objects and lists of tensors, which it never changes."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr)
        for group in self.param_groups:
            group["settings"] = Settings()
            group["parts"] = [torch.ones(2), {"table": torch.eye(2)}, (1, Settings())]


class Wide(torch.optim.Optimizer):
    """Keeps weights of a narrow type in a wide one, and counts in whole numbers beside them."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is None:
                    continue
                state = self.state[each]
                if not state:
                    state["master"] = each.detach().double()
                    state["seen"] = torch.zeros_like(each, dtype=torch.int64)
                state["seen"] += 1
                state["master"] -= group["lr"] * each.grad.double() / state["seen"].double().sqrt()
                each.copy_(state["master"])


class Listing(Wide):
    """Keeps tensors in a list, as optimizers with several preconditioners do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for state in self.state.values():
            state["parts"] = [torch.eye(2)]


@dataclass(kw_only=True)
class Unusual(Toy):
    """``net``: which of the models above; ``how``: which optimizer, or what else is unusual."""

    net: str = ""
    how: str = ""

    def model(self) -> nn.Module:
        return NETS[self.net]() if self.net else Net(self)

    def optimizer(self, model: nn.Module, lr: float, weight_decay: float) -> Any:
        parameters = [each for each in model.parameters() if each.requires_grad]
        if self.how == "two":
            half = len(parameters) // 2
            return [torch.optim.SGD(part, lr=lr) for part in (parameters[:half], parameters[half:])]
        if self.how == "closure":
            return torch.optim.LBFGS(parameters, lr=lr)
        if self.how == "foreign":
            return torch.optim.SGD([*parameters, nn.Parameter(torch.ones(2))], lr=lr)
        kinds: dict[str, Any] = {
            "growing": Growing, "holding": Holding, "wide": Wide, "listing": Listing,
            "sparse": torch.optim.SparseAdam, "sgd": torch.optim.SGD,
        }  # fmt: skip
        if self.how in kinds:
            return kinds[self.how](parameters, lr=lr)
        found = torch.optim.AdamW(parameters, lr=lr, weight_decay=weight_decay)
        if isinstance(model, AveragedNet):
            found.register_step_post_hook(model.follow)
        return found


@dataclass(kw_only=True)
class SkipsParameters(Unusual):
    skips_parameters: ClassVar[bool] = True


class Named(dict[str, Any]):
    """A batch as libraries make them: a dict whose entries are attributes as well."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


@dataclass(kw_only=True)
class NamedBatches(Toy):
    def collate(self, samples: Sequence[Any]) -> Any:
        x, y, index = default_collate(list(samples))
        return Named(x=x, y=y, index=index)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return super().loss(model, (batch.x, batch.y, batch.index))

    def score(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return super().score(model, (batch.x, batch.y, batch.index))


class Stream(IterableDataset[Any]):
    """Has a length, and cannot be indexed."""

    def __init__(self, points: Points) -> None:
        self.points = points

    def __len__(self) -> int:
        return len(self.points)

    def __iter__(self) -> Any:
        return (self.points[index] for index in range(len(self)))


@dataclass(kw_only=True)
class Streaming(Toy):
    def dataset(self, split: str) -> Dataset[Any] | None:
        return Stream(Points(37, 1, self)) if split == "train" else None
