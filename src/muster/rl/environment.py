"""The protocol of environments: many at once, one row of every tensor each.

There are two kinds: batched tensor environments (``BatchedEnv``) and Gymnasium's
(``rl.gymnasium_envs``). ``tests/contract/test_environments.py`` tests what the protocol promises.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from muster.base.errors import TargetError, UsageError

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
    """``len(low)`` numbers within bounds, which are infinite where there are none.

    Actions are float32 [num_envs, len(low)]; the environment clips them, not the policy.
    """

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
        extras: names of the numbers that are reported of every finished episode.
        min_truncation_steps: an episode that is truncated has at least so many steps. A rollout
            reserves memory for as few final observations as that allows.
    """

    name: str
    num_envs: int
    observation: Mapping[str, Entry]
    actions: Actions
    extras: tuple[str, ...] = ()
    min_truncation_steps: int = 1


@dataclass(frozen=True, kw_only=True)
class Place:
    """Which environments to make.

    Their random streams are functions of (``seed``, ``first_env`` + row, number of the episode), so
    that they do not depend on how many ranks share the work.
    """

    num_envs: int
    first_env: int
    seed: int
    device: torch.device


class Outcome(NamedTuple):
    """What a step has led to; all rows [num_envs].

    Attributes
        observation: what the next decision is about; where an episode has ended, the first
            observation of the next one (unless the environment needs a step to start: ``valid``).
        reward: float32; whole numbers and bools are taken as such.
        terminated: bool; the episode ended in a state after which there is no reward.
        truncated: bool; the episode was cut off, so the value of its last state counts. Never both:
            terminated wins.
        starts: bool; ``observation`` is the first one of an episode.
        valid: bool; False where the action was ignored, because the environment used this step to
            start anew. Such a step is not part of any episode.
        final: the observation after this step and before any reset. Only rows that ended are read,
            so it may be empty where none has.
        extras: numbers by name; only rows that ended are read.
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
        """Begin an episode in every environment and return its first observation.

        It is the first episode of the environment's stream, or the next one.
        """
        ...

    def step(self, actions: Tensor) -> Outcome:
        """Take one step in every environment; the returned tensors are never written to again."""
        ...

    def state(self) -> dict[str, Tensor]:
        """Return what is needed to go on exactly: tensors with one row per environment.

        Further dimensions may differ between ranks; they are padded with zeros at the end when
        rows of several ranks are put together.
        """
        ...

    def restore(self, state: Mapping[str, Tensor]) -> Observation | None:
        """Go on where ``state`` was taken, and return the observation it was taken at.

        None where that is impossible (an environment that does not repeat itself): then every
        environment must be reset. Raises UsageError for a state of another number of environments.
        """
        ...

    def close(self) -> None: ...


class Change(NamedTuple):
    """What a step did, rows [num_envs]; see ``Outcome``. ``terminated`` and ``truncated`` may
    both be True: terminated wins.
    """

    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    extras: dict[str, Tensor]


class BatchedEnv(ABC):
    """A ``VectorEnv`` whose subclass says how rows begin, advance and are observed.

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
        """Make the state in which every environment begins episode ``self.episode``, for all rows.

        Random numbers must be functions of (place.seed, self.index, self.episode).
        """

    @abstractmethod
    def advance(self, actions: Tensor) -> Change:
        """Take one step in every row by replacing entries of ``self.rows``."""

    @abstractmethod
    def observe(self) -> Observation:
        """Return what a policy observes of ``self.rows``, as new tensors."""

    def reset(self) -> Observation:
        self.episode = self.episode + 1
        self.rows = self.fresh()
        self._is_begun = True
        return self.observe()

    def step(self, actions: Tensor) -> Outcome:
        self._check_begun("step")
        change = self.advance(actions)
        self._check_change(change)
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

    def _check_change(self, change: Change) -> None:
        # Before the flags meet other rows: a column of them would make a table of the episodes.
        who, rows = f"The environments {self._spec.name!r}", (self._spec.num_envs,)
        given: tuple[Any, Any, Any] = change[:3]
        for name, values in zip(Change._fields, given, strict=False):
            if not isinstance(values, Tensor) or values.shape != rows:
                raise _wrong(who, name, values, rows, "float32" if name == "reward" else "bool")

    def _check_begun(self, call: str) -> None:
        if not self._is_begun:
            raise RuntimeError(f"{call} before reset: call reset() or restore() first.")


def _chosen(which: Tensor, first: Tensor, second: Tensor) -> Tensor:
    return torch.where(which.view(-1, *[1] * (second.dim() - 1)), first, second)


# ------------------------------------------------------------------------------------- checks
# Without them torch would often make something of a wrong shape: it repeats one row for all
# environments, or makes a table of a column of rewards.

_FLAGS = ("terminated", "truncated", "starts", "valid")


def check_spec(who: str, spec: EnvSpec, num_envs: int) -> None:
    """TargetError where ``spec`` is of other environments than were asked for, or of actions that
    cannot be learnt. ``who``: begins the sentence, such as "The environments of Recaller".
    """
    if not isinstance(spec.actions, Discrete | Continuous):
        raise TargetError(
            f"{who} have the actions {spec.actions!r}, which are neither muster.agents.Discrete "
            "nor Continuous.",
            hint="write Discrete(number of actions) or Continuous(lows, highs) in the spec.",
        )
    if spec.num_envs != num_envs:
        raise TargetError(
            f"{who} are {spec.num_envs} by their spec, and {num_envs} were asked for.",
            hint="make place.num_envs of them, and say so in the spec.",
        )


def check_observation(who: str, spec: EnvSpec, seen: Observation, call: str = "reset") -> None:
    """TargetError where the observation that ``call`` gives is not what ``spec`` says."""
    if not isinstance(seen, Mapping):
        raise TargetError(
            f"{who} give {_shown(seen)} as an observation ({call}), which has to be a dict of "
            "tensors by name.",
            hint="return what the spec names, such as {'observation': tensor}.",
        )
    for name, entry in spec.observation.items():
        said, got = (spec.num_envs, *entry.shape), seen.get(name)
        if isinstance(got, Tensor) and tuple(got.shape) == said and got.dtype == entry.dtype:
            continue
        hint = "correct the Entry of the spec, or what reset and step give."
        if isinstance(got, Tensor) and tuple(got.shape) == said:  # which is meant cannot be known
            hint = (
                f"write Entry({entry.shape}, {got.dtype}) in the spec, or give "
                f"values.to({entry.dtype})."
            )
        raise TargetError(
            f"{who} give {_shown(got)} for the observation {name!r} ({call}), and their spec "
            f"says {said} of {_kind(entry.dtype)}: environments first.",
            hint=hint,
        )


def check_outcome(who: str, spec: EnvSpec, outcome: Outcome) -> None:
    """TargetError where a step gives what ``spec`` and ``Outcome`` do not say.

    ``final`` is checked where it is read.
    """
    check_observation(who, spec, outcome.observation, "step")
    said = (spec.num_envs,)
    reward: Any = outcome.reward
    if not isinstance(reward, Tensor) or reward.shape != said or reward.is_complex():
        raise _wrong(who, "reward", reward, said, "float32")
    for name in _FLAGS:
        flags: Any = getattr(outcome, name)
        if not isinstance(flags, Tensor) or flags.shape != said or flags.dtype != torch.bool:
            raise _wrong(who, name, flags, said, "bool")
    for name in spec.extras:
        extra: Any = outcome.extras.get(name)
        if not isinstance(extra, Tensor) or extra.shape != said:
            raise _wrong(who, f"extra {name!r}", extra, said, "any number")


def as_number(reward: Tensor) -> Tensor:
    """The reward of a step, with whole numbers and bools as float32: nothing is lost in meaning."""
    is_whole = not (reward.is_floating_point() or reward.is_complex())
    return reward.to(torch.float32) if is_whole else reward


def check_same_kind(who: str, name: str, first: Tensor, now: Tensor | None) -> None:
    """TargetError where a later step gives nothing, or another shape or type than the ``first``."""
    if now is None or now.shape != first.shape or now.dtype != first.dtype:
        raise TargetError(
            f"{who} gave {_shown(first)} for {name!r} at first and now give {_shown(now)}.",
            hint="every step has to give the same shapes and types.",
        )


def check_masks(who: str, observation: Observation, valid: Tensor) -> None:
    """TargetError where a mask of a whole rollout, [T, N, actions], allows nothing."""
    mask = observation.get(ACTION_MASK)
    if mask is None:
        return
    nothing = ~mask.any(-1) & valid
    if bool(nothing.any()):
        step, env = nothing.nonzero()[0].tolist()
        raise TargetError(
            f"{who} gave an {ACTION_MASK} that allows nothing, in environment {env} of this rank "
            f"at step {step} of the rollout.",
            hint="end an episode in which nothing can be done.",
        )


def _wrong(who: str, name: str, got: object, said: tuple[int, ...], kind: str) -> TargetError:
    return TargetError(
        f"{who} give {_shown(got)} for the {name} of a step, which has to be {said} of {kind}: one "
        "value for each environment.",
        hint="correct what advance or step returns.",
    )


def _shown(got: object) -> str:
    if got is None:
        return "nothing"
    if isinstance(got, Tensor):
        return f"a tensor of shape {tuple(got.shape)} of {_kind(got.dtype)}"
    return f"a value of {type(got).__name__}"


def _kind(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
