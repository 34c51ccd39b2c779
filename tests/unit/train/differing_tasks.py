"""Tasks whose ranks do not have the same state, or change what they have while they train."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import torch
from tests.unit.rl.toy_agents import CartPoleAgent
from tests.unit.train.toy_tasks import Points, Toy
from torch import Tensor, nn
from torch.utils.data import Dataset

from muster.gang.beacon import BEACON
from muster.rl.environment import EnvSpec
from muster.rl.policy import Policy, PolicyOutput, RecurrentPolicy

KIND = torch.float64
#: Of the steps, or updates, made so far: when something changes.
AT = 3


def is_rank_1() -> bool:
    return os.environ.get("RANK") == "1"


def is_here(how: str) -> bool:
    """Whether a change called ``how`` happens on this rank."""
    return is_rank_1() or not how.endswith("-on-one")


def digest(model: nn.Module) -> str:
    """Of all that a model has: tensors, what its modules keep beside them, and what is trained."""
    found = sha256()
    for name, value in sorted(model.state_dict().items(), key=lambda item: item[0]):
        found.update(name.encode())
        found.update(value.numpy().tobytes() if isinstance(value, Tensor) else repr(value).encode())
    found.update(repr([each.requires_grad for each in model.parameters()]).encode())
    return found.hexdigest()


class Net(nn.Module):
    """Two layers; ``how``: what differs between ranks from the start, or changes later on."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        wide = 5 if how == "shape-on-one" and is_rank_1() else 4
        kind = torch.float32 if how == "type-on-one" and is_rank_1() else KIND
        self.first = nn.Linear(3, wide, dtype=KIND)
        self.second = nn.Linear(wide, 1, dtype=kind)
        if how == "order-on-one" and is_rank_1():
            self._modules["first"] = self._modules.pop("first")
        if how == "more-on-one" and is_rank_1():
            self.third = nn.Linear(1, 1, dtype=KIND)
        if how == "buffer-on-one" and is_rank_1():
            self.register_buffer("count", torch.zeros(()))
        if how == "lazy":
            self.second = nn.LazyLinear(1, dtype=KIND)
        if how.startswith("thaws") or (how == "frozen-on-one" and is_rank_1()):
            self.first.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        is_due = self.training and BEACON.step >= AT and BEACON.phase == "forward"
        if is_due and is_here(self.how):
            self._change()
        hidden = torch.tanh(self.first(x)).to(self.second.weight.dtype)
        found: Tensor = self.second(hidden).sum(-1)
        if hasattr(self, "late"):
            found = found + self.late
        if hasattr(self, "third"):
            found = found + self.third(found.unsqueeze(-1)).squeeze(-1)
        return found

    def _change(self) -> None:
        if self.how.startswith("thaws"):
            self.first.requires_grad_(True)
        elif self.how.startswith("freezes"):
            self.first.requires_grad_(False)
        elif self.how.startswith("grows") and not hasattr(self, "late"):
            self.late = nn.Parameter(torch.zeros((), dtype=KIND))
        elif self.how.startswith("keeps") and not hasattr(self, "kept"):
            self.register_buffer("kept", torch.ones(7))
        elif self.how == "draws":
            with torch.no_grad():
                self.second.bias.normal_()


class Noisy(torch.optim.SGD):
    """Adds noise to every step, as Langevin dynamics and stochastic rounding do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    each.grad += 1e-3 * torch.randn_like(each)
        return super().step(closure)


@dataclass(kw_only=True)
class Differing(Toy):
    """``how``: what differs, or changes; ``digest``: of the model when it was judged last."""

    how: str = ""
    digest: str = ""

    def model(self) -> nn.Module:
        self.made = Net(self.how)
        return self.made

    def dataset(self, split: str) -> Dataset[Any] | None:
        more = self.how == f"{split}-count-on-one" and is_rank_1()
        data = Points((self.samples if split == "train" else self.val) + more, 1, self)
        if self.how == f"{split}-data-on-one" and is_rank_1():
            data.x, data.y = data.x.flip(0), data.y.flip(0)
        return None if split == "test" else data

    def optimizer(self, model: nn.Module, lr: float, weight_decay: float) -> torch.optim.Optimizer:
        parameters = list(model.parameters())
        if self.how == "noise":
            return Noisy(parameters, lr=lr)
        decay = 0.1 if self.how == "decay-on-one" and is_rank_1() else 0.0
        made = torch.optim.AdamW(parameters, lr=lr, weight_decay=decay)
        if self.how == "moments-on-one" and is_rank_1():
            made.register_step_pre_hook(_forget_moments)
        if self.how == "stiffens-on-one" and is_rank_1():
            made.register_step_post_hook(self._stiffen)
        return made

    def _stiffen(self, *_: Any) -> None:
        if BEACON.step == AT:
            self.made.first.requires_grad_(False)

    def score(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        if not self.rehearsing:
            self.digest = digest(self.made)
        return super().score(model, batch)


@dataclass(kw_only=True)
class Skipping(Differing):
    skips_parameters = True


def _forget_moments(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if BEACON.step == AT:
        for state in optimizer.state.values():
            state["exp_avg"].zero_()


class DifferingPolicy(RecurrentPolicy):
    """``how``: as of ``Net``; what changes does so before the rollout that follows update ``AT``,
    or, where it is late or draws, in the learning from it.
    """

    how = ""

    def refresh(self, num_envs: int, num_steps: int) -> None:
        if BEACON.step >= AT and is_here(self.how) and not self.how.endswith("-late"):
            self._change()

    def forward(self, *args: Any) -> PolicyOutput:
        if BEACON.step >= AT and (self.how == "draws" or self.how.endswith("-late")):
            self._change()
        output = super().forward(*args)
        if hasattr(self, "late"):
            output = output._replace(value=output.value + self.late)
        return output

    def _change(self) -> None:
        critic = self.net.critic
        if self.how.startswith("thaws"):
            critic.requires_grad_(True)
        elif self.how.startswith("freezes"):
            critic.requires_grad_(False)
        elif self.how.startswith("grows") and not hasattr(self, "late"):
            self.late = nn.Parameter(torch.zeros((), dtype=KIND))
        elif self.how.startswith("keeps") and not hasattr(self, "kept"):
            self.register_buffer("kept", torch.ones(7))
        elif self.how == "draws":
            with torch.no_grad():
                next(critic.parameters()).normal_()


@dataclass
class DifferingAgent(CartPoleAgent):
    """``how``: what differs, or changes; ``digest``: of the policy when it was judged last."""

    how: str = ""
    digest: str = ""

    def policy(self, spec: EnvSpec) -> Policy:
        wide = 9 if self.how == "shape-on-one" and is_rank_1() else 8
        made = DifferingPolicy(spec, hidden=8, layers=(wide,), memory="none").double()
        made.how = self.how
        if self.how.startswith("thaws") or (self.how == "frozen-on-one" and is_rank_1()):
            made.net.critic.requires_grad_(False)
        if self.how == "more-on-one" and is_rank_1():
            made.third = nn.Linear(1, 1, dtype=KIND)
        if self.how == "buffer-on-one" and is_rank_1():
            made.register_buffer("count", torch.zeros(()))
        if self.how == "unused":
            made.third = nn.Linear(1, 1, dtype=KIND)
        if self.how == "lazy":
            made.net.critic = nn.LazyLinear(1, dtype=KIND)
        self._made = made
        return made

    def identity(self) -> dict[str, str]:
        return {"ranks": "1" if self.how == "identity-on-one" and is_rank_1() else "0"}


#: As of ``Job.config``.
AGENT: Mapping[str, Any] = {"num_envs": 4, "batch_size": 2, "eval_frequency": 0, "eval_episodes": 1}
