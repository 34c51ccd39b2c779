"""The seam to environments: many at once, one row of every tensor each.

What implements it keeps the promises of ``tests/contract/test_environments.py``. Two do: batched
tensor environments (``BatchedEnv``) and Gymnasium's (``rl.gymnasium_envs``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from muster.base.errors import UsageError

Split = Literal["train", "val", "test"]
#: Named tensors of shape [num_envs, ...], on the environments' device.
Observation = dict[str, Tensor]
#: The entry of an observation that says which discrete actions are possible now: bool
#: [num_envs, num_actions], at least one True per row. Absent: all are.
ACTION_MASK = "action_mask"


class Discrete(NamedTuple):
    """One of ``num_actions``; actions are int64 [num_envs]."""

    num_actions: int


class Continuous(NamedTuple):
    """``len(low)`` numbers within bounds (infinite where there are none); actions are float32
    [num_envs, len(low)] and are clipped by the environment, not by the policy."""

    low: tuple[float, ...]
    high: tuple[float, ...]


Actions = Discrete | Continuous


class Entry(NamedTuple):
    """Shape and type of one entry of an observation, without the leading num_envs."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True, kw_only=True)
class EnvSpec:
    """What a policy and a learner need to know of environments.

    Attributes
        observation: entries by name, ``ACTION_MASK`` among them where there is one.
        extras: names of the numbers that are told of every finished episode.
        min_truncation_steps: an episode that is truncated has at least so many steps. A rollout
            keeps as few final observations as that allows.
    """

    name: str
    num_envs: int
    observation: Mapping[str, Entry]
    actions: Actions
    extras: tuple[str, ...] = ()
    min_truncation_steps: int = 1


@dataclass(frozen=True, kw_only=True)
class Place:
    """Which environments to make. Their random streams are functions of (``seed``, ``first_env``
    + row, number of the episode), so that they do not depend on how many ranks share the work."""

    num_envs: int
    first_env: int
    seed: int
    device: torch.device


class Outcome(NamedTuple):
    """What a step has led to; all rows [num_envs].

    Attributes
        observation: what the next decision is about; where an episode has ended, the first
            observation of the next one (unless the environment needs a step to start: ``valid``).
        reward: float32.
        terminated: bool; the episode ended in a state from which nothing more can come.
        truncated: bool; it was cut off, and its value goes on. Never both: terminated wins.
        starts: bool; ``observation`` is the first one of an episode.
        valid: bool; False where the action was ignored, because the environment used this step to
            start anew. Such a step is not part of any episode.
        final: the observation after this step and before any reset. Only rows that ended are
            looked at.
        extras: numbers by name; only rows that ended are looked at.
    """

    observation: Observation
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    starts: Tensor
    valid: Tensor
    final: Observation
    extras: dict[str, Tensor]


class VectorEnv(Protocol):
    """Environments side by side. Calls in the wrong order raise RuntimeError with the remedy."""

    @property
    def spec(self) -> EnvSpec: ...

    def reset(self) -> Observation:
        """Every environment begins an episode: the first of its stream, or the next one where
        there was one before."""
        ...

    def step(self, actions: Tensor) -> Outcome:
        """One step of every environment. The tensors returned are never written to again."""
        ...

    def state(self) -> dict[str, Tensor]:
        """Enough to go on exactly: tensors with one row per environment.

        Further dimensions may differ between ranks; they are padded with zeros at the end when
        rows of several ranks are put together.
        """
        ...

    def restore(self, state: Mapping[str, Tensor]) -> Observation | None:
        """Go on where ``state`` was taken, and give the observation it was taken at.

        None where that is impossible (an environment that does not repeat itself): then every
        environment has to be reset.
        """
        ...

    def close(self) -> None: ...


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
