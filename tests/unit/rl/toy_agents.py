"""Small agents for tests of the learner, on real environments."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from tests.unit.rl.batched_cartpole import BatchedCartPole
from torch import Tensor

from muster.rl.environment import EnvSpec, Observation, Outcome, Place, Split, VectorEnv
from muster.rl.gymnasium_envs import make_gymnasium
from muster.rl.policy import Policy, PolicyOutput, RecurrentPolicy
from muster.rl.task import AgentTask


class Wide(BatchedCartPole):
    """Seen in float64 where ``wide``, for comparisons that rounding must not blur."""

    def __init__(self, place: Place, max_steps: int, wide: bool) -> None:
        super().__init__(place, max_steps=max_steps)
        self._wide = wide
        if wide:
            entry = self._spec.observation["observation"]._replace(dtype=torch.float64)
            self._spec = dataclasses.replace(self._spec, observation={"observation": entry})

    def observe(self) -> Observation:
        seen = super().observe()
        return {name: v.double() for name, v in seen.items()} if self._wide else seen


class Troubled(Wide):
    """Asks for a stop, gives a NaN or has no memory, in one step."""

    def __init__(self, place: Place, max_steps: int, wide: bool, trouble: str, at: int) -> None:
        super().__init__(place, max_steps, wide)
        self._trouble, self._left = trouble, at

    def step(self, actions: Tensor) -> Outcome:
        outcome = super().step(actions)
        self._left -= 1
        if self._left != 0:
            return outcome
        if self._trouble == "stop":
            os.kill(os.getpid(), signal.SIGTERM)
        if self._trouble == "memory":
            raise MemoryError("Unable to allocate 7 TiB")
        if self._trouble == "nan":
            return outcome._replace(reward=outcome.reward * torch.nan)
        return outcome


class BadGradient(RecurrentPolicy):
    """Its values are right, and the gradient of the forward number ``at`` is not a number."""

    at = 0

    def forward(self, *args: Any) -> PolicyOutput:
        output = super().forward(*args)
        self.at -= 1
        if self.at != 0:
            return output
        nothing = torch.sqrt(0.0 * next(self.net.critic.parameters()).sum())
        return output._replace(value=output.value + nothing)


class Unstorable(RecurrentPolicy):
    """Keeps what no checkpoint can hold."""

    def get_extra_state(self) -> Any:
        return {"made": object()}

    def set_extra_state(self, state: Any) -> None:
        return


class Remembering(RecurrentPolicy):
    """Its values follow from a buffer, and from a number beside it, of what this rank has seen."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.register_buffer("seen", torch.zeros(()))
        self.count = 0.0

    def forward(self, observation: Any, *rest: Any) -> PolicyOutput:
        mean = next(iter(observation.values())).double().mean().detach()
        self.seen: Tensor = 0.9 * self.seen + 0.1 * mean
        self.count = 0.9 * self.count + mean.abs().item()
        output = super().forward(observation, *rest)
        return output._replace(value=output.value + self.seen + 0.01 * self.count)

    def get_extra_state(self) -> Any:
        return {"count": self.count}

    def set_extra_state(self, state: Any) -> None:
        self.count = state["count"]


@dataclass
class CartPoleAgent(AgentTask):
    """Batched CartPole; ``on``: the first environment of the rank that has the ``trouble``."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "num_envs": 8, "rollout_steps": 24, "batch_size": 4, "update_epochs": 2,
        "num_steps": 6 * 24 * 8, "lr": 3e-3, "eval_frequency": 3, "eval_episodes": 5,
    }  # fmt: skip
    memory: Literal["lstm", "none"] = "lstm"
    wide: bool = True
    remembers: bool = False
    max_steps: int = 20
    trouble: str = ""
    at: int = 0
    on: int = 0

    def environments(self, split: Split, place: Place) -> VectorEnv:
        if split == "train" and self.trouble and place.first_env == self.on:
            return Troubled(place, self.max_steps, self.wide, self.trouble, self.at)
        return Wide(place, self.max_steps, self.wide)

    def policy(self, spec: EnvSpec) -> Policy:
        kinds = {"gradient": BadGradient, "unstorable": Unstorable}
        kind = kinds.get(self.trouble, Remembering if self.remembers else RecurrentPolicy)
        made = kind(spec, hidden=16, layers=(8,), memory=self.memory)
        if isinstance(made, BadGradient):
            made.at = self.at
        return made.double() if self.wide else made

    def finish(
        self, policy: Policy, device: torch.device, seed: int, folder: Path
    ) -> dict[str, Any]:
        return {"count": policy.normaliser.state_dict()["moments.0.count"].item()}


@dataclass
class GymnasiumAgent(AgentTask):
    """Any Gymnasium environment; float32."""

    env: str = "CartPole-v1"
    vectorization: Literal["sync", "async", "native"] = "sync"
    defaults: ClassVar[Mapping[str, Any]] = CartPoleAgent.defaults

    def environments(self, split: Split, place: Place) -> VectorEnv:
        return make_gymnasium(
            self.env, place, vectorization=self.vectorization, observe=None, env_kwargs={}
        )

    def policy(self, spec: EnvSpec) -> Policy:
        return RecurrentPolicy(spec, hidden=16, layers=(8,))
