"""Environments as tensors: thousands step at once, on the device, without a word to the host."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from muster.base.errors import UsageError
from muster.rl.environment import EnvSpec, Observation, Outcome, Place


class Change(NamedTuple):
    """What a step did, rows [num_envs]; see ``Outcome``. ``terminated`` and ``truncated`` may
    both be True: terminated wins."""

    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    extras: dict[str, Tensor]


class BatchedEnv(ABC):
    """A ``VectorEnv`` whose subclass says how rows begin, advance and look.

    A subclass keeps its state in ``self.rows``, a dict of tensors [num_envs, ...], and replaces
    entries rather than writing into them. It never asks whether *any* row has ended: that would
    make the host wait. Ended rows start anew in the same step.
    """

    def __init__(self, spec: EnvSpec, place: Place) -> None:
        self._spec = spec
        self.place = place
        self.device = place.device
        #: Global numbers of these environments, int64 [num_envs].
        self.index = place.first_env + torch.arange(place.num_envs, device=place.device)
        #: Which episode each is in, int64 [num_envs]; -1 before the first.
        self.episode = torch.full_like(self.index, -1)
        self.rows: dict[str, Tensor] = {}
        self._is_begun = False

    @property
    def spec(self) -> EnvSpec:
        return self._spec

    @abstractmethod
    def fresh(self) -> dict[str, Tensor]:
        """The state in which every environment begins episode ``self.episode``, for all rows;
        random numbers are functions of (place.seed, self.index, self.episode)."""

    @abstractmethod
    def advance(self, actions: Tensor) -> Change:
        """One step of every row: replaces entries of ``self.rows``."""

    @abstractmethod
    def observe(self) -> Observation:
        """What is seen of ``self.rows``; new tensors."""

    def reset(self) -> Observation:
        self.episode = self.episode + 1
        self.rows = self.fresh()
        self._is_begun = True
        return self.observe()

    def step(self, actions: Tensor) -> Outcome:
        self._check_begun("step")
        change = self.advance(actions)
        final = self.observe()
        ended = change.terminated | change.truncated
        self.episode = self.episode + ended
        fresh = self.fresh()
        self.rows = {name: _chosen(ended, fresh[name], kept) for name, kept in self.rows.items()}
        return Outcome(
            observation=self.observe(),
            reward=change.reward,
            terminated=change.terminated,
            truncated=change.truncated & ~change.terminated,
            starts=ended,
            valid=torch.ones_like(ended),
            final=final,
            extras=change.extras,
        )

    def state(self) -> dict[str, Tensor]:
        self._check_begun("state")
        return {"episode": self.episode, **{f"rows.{k}": v for k, v in self.rows.items()}}

    def restore(self, state: Mapping[str, Tensor]) -> Observation:
        if len(state["episode"]) != self.place.num_envs:
            raise UsageError(
                f"{self._spec.name}: the state is of {len(state['episode'])} environments, and "
                f"there are {self.place.num_envs}."
            )
        self.episode = state["episode"].to(self.device)
        self.rows = {
            name.removeprefix("rows."): values.to(self.device)
            for name, values in state.items()
            if name.startswith("rows.")
        }
        self._is_begun = True
        return self.observe()

    def close(self) -> None:
        return

    def _check_begun(self, call: str) -> None:
        if not self._is_begun:
            raise RuntimeError(f"{call} before reset: call reset() or restore() first.")


def _chosen(which: Tensor, first: Tensor, second: Tensor) -> Tensor:
    return torch.where(which.view(-1, *[1] * (second.dim() - 1)), first, second)
