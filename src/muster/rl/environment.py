"""The seam to environments: many at once, one row of every tensor each.

What implements it keeps the promises of ``tests/contract/test_environments.py``. Two do: batched
tensor environments (``rl.batched``) and Gymnasium's (``rl.gymnasium_envs``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

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
