"""Gymnasium's import, and its spaces as actions and as the flat observation of ``environment``; and
resuming in the middle of an episode by replaying it: its seed and its actions are kept.

Gymnasium's environments cannot be saved. One that is a function of its seed and of the actions
reaches the same point when it is started with the seed and given the actions once more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from muster.base.errors import MissingPackageError, SetupError, UsageError, how_to_install
from muster.rl.environment import ACTION_MASK, Actions, Continuous, Discrete, Entry, Observation

try:
    import gymnasium as gymnasium
    from gymnasium.vector import AutoresetMode as AutoresetMode
except ModuleNotFoundError as error:
    if error.name is None or not error.name.startswith("gymnasium"):
        raise
    raise MissingPackageError("A Gymnasium environment", "gymnasium", "rl") from None
except ImportError as error:
    raise SetupError(
        f"Gymnasium environments need gymnasium >= 1.1; the one here cannot be used: {error}.",
        hint=f"{how_to_install('rl')}.",
    ) from error

Space = gymnasium.Space[Any]
Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]

#: Combinations of a MultiDiscrete that are still one output of a network each.
MAX_COMBINATIONS = 1024
_FLATTENED = "Box, Discrete, MultiBinary, MultiDiscrete, and Dict and Tuple of them"


@dataclass(frozen=True, kw_only=True)
class Reader:
    """Reads batches of observations of one space.

    Attributes
        space: of one environment, without the action mask.
        mask_space: of the entry ``action_mask``, where the observation is a Dict that has one.
        components: which of the flat numbers are kept; None keeps all.
    """

    env: str
    space: Space
    mask_space: Space | None
    components: NDArray[np.int64] | None
    size: int

    @staticmethod
    def of(env: str, space: Space, observe: tuple[int, ...] | None) -> Reader:
        """Make a reader. Raises UsageError for spaces without a flat form, and for ``observe``
        outside of it.
        """
        mask_space = None
        if isinstance(space, gymnasium.spaces.Dict) and ACTION_MASK in space.spaces:
            mask_space = space.spaces[ACTION_MASK]
            others = [(k, s) for k, s in space.spaces.items() if k != ACTION_MASK]
            space = gymnasium.spaces.Dict(others)  # a list keeps its order
        _check_observation(env, space)
        size = gymnasium.spaces.flatdim(space)
        if size == 0:
            raise UsageError(f"{env}: its observation space {space} is empty.")
        components = None if observe is None else _components(env, observe, size)
        return Reader(
            env=env,
            space=space,
            mask_space=mask_space,
            components=components,
            size=size if components is None else len(components),
        )

    def flat(self, batch: Any, num_envs: int) -> Floats:
        """[num_envs, size], a new array; each row as ``gymnasium.spaces.flatten`` orders it.
        Numbers outside float32 become infinite.
        """
        with np.errstate(over="ignore"):
            parts = _flat_parts(self.space, batch, num_envs)
            whole = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
        return whole if self.components is None else whole[:, self.components]

    def flat_one(self, observation: Any) -> Floats:
        """[size]: an observation that is not part of a batch."""
        with np.errstate(over="ignore"):
            flat = np.asarray(gymnasium.spaces.flatten(self.space, observation), np.float32)
        return flat if self.components is None else flat[self.components]


def _flat_parts(space: Space, batch: Any, num_envs: int) -> list[Floats]:
    """Float32 [num_envs, .] each, none of them memory of ``batch``."""
    spaces = gymnasium.spaces
    if isinstance(space, spaces.Dict):
        return [
            part
            for key, inner in space.spaces.items()
            for part in _flat_parts(inner, batch[key], num_envs)
        ]
    if isinstance(space, spaces.Tuple):
        return [
            part
            for inner, values in zip(space.spaces, batch, strict=True)
            for part in _flat_parts(inner, values, num_envs)
        ]
    values = np.asarray(batch).reshape(num_envs, -1)
    if isinstance(space, spaces.Discrete):
        return [_one_hot(values - space.start, np.array([space.n]))]
    if isinstance(space, spaces.MultiDiscrete):
        return [_one_hot(values - space.start.reshape(-1), space.nvec.reshape(-1))]
    return [values.astype(np.float32, copy=True)]


def _one_hot(values: NDArray[Any], sizes: NDArray[Any]) -> Floats:
    """``values`` [num_envs, len(sizes)] as [num_envs, sum(sizes)] with a one for each."""
    offsets = np.cumsum(sizes) - sizes
    hot = np.zeros((len(values), int(sizes.sum())), np.float32)
    hot[np.arange(len(values))[:, None], values + offsets] = 1
    return hot


def _check_observation(env: str, space: Space) -> None:
    spaces = gymnasium.spaces
    if isinstance(space, spaces.Dict | spaces.Tuple):
        inner = space.spaces
        for part in inner.values() if isinstance(inner, Mapping) else inner:
            _check_observation(env, part)
    elif isinstance(space, spaces.Box) and space.dtype == np.uint8 and len(space.shape) == 3:
        raise UsageError(
            f"{env}: it observes images {space.shape}, and the policies here read numbers.",
            hint="register a version with wrappers that turn the image into a vector.",
        )
    elif not isinstance(
        space, spaces.Box | spaces.Discrete | spaces.MultiBinary | spaces.MultiDiscrete
    ):
        raise UsageError(
            f"{env}: its observation space {space} has no flat form of fixed size.",
            hint=f"these have: {_FLATTENED}.",
        )


def _components(env: str, observe: tuple[int, ...], size: int) -> NDArray[np.int64]:
    wrong = sorted({i for i in observe if not 0 <= i < size or observe.count(i) > 1})
    if wrong or not observe:
        shown = ", ".join(map(str, wrong)) or "nothing"
        raise UsageError(
            f"{env}: cannot observe {shown}: a flat observation has the components 0 to "
            f"{size - 1}, and each can be named once."
        )
    return np.array(observe, np.int64)


@dataclass(frozen=True, kw_only=True)
class ActionWriter:
    """Turns actions of a policy into those of a batched action space."""

    actions: Actions
    space: Space

    @staticmethod
    def of(env: str, space: Space) -> ActionWriter:
        """Make a writer. Raises UsageError for a space that is neither discrete nor continuous."""
        spaces = gymnasium.spaces
        if isinstance(space, spaces.Discrete):
            return ActionWriter(actions=Discrete(int(space.n)), space=space)
        if isinstance(space, spaces.MultiDiscrete | spaces.MultiBinary):
            combinations = math.prod(_sizes(space))
            if combinations > MAX_COMBINATIONS:
                raise UsageError(
                    f"{env}: its action space {space} has {combinations} combinations, more than "
                    f"the {MAX_COMBINATIONS} that are learnt as separate actions.",
                    hint="register a version with a wrapper that offers fewer.",
                )
            return ActionWriter(actions=Discrete(combinations), space=space)
        if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
            low, high = space.low.reshape(-1).tolist(), space.high.reshape(-1).tolist()
            return ActionWriter(actions=Continuous(tuple(low), tuple(high)), space=space)
        raise UsageError(
            f"{env}: its action space {space} is not supported.",
            hint="these are: Discrete, MultiDiscrete, MultiBinary, and Box of floats.",
        )

    def batch(self, actions: NDArray[Any]) -> NDArray[Any]:
        """Actions [num_envs, ...] as the batched space has them; numbers are clipped to bounds."""
        space, spaces = self.space, gymnasium.spaces
        if isinstance(space, spaces.Discrete):
            return np.asarray(actions + space.start, space.dtype)
        if isinstance(space, spaces.Box):
            shaped = actions.reshape(len(actions), *space.shape).astype(space.dtype)
            return np.asarray(np.clip(shaped, space.low, space.high))
        sizes = _sizes(space)
        parts = np.stack(np.unravel_index(actions, sizes), axis=-1)
        parts = parts.reshape(len(actions), *(space.shape or ()))
        if isinstance(space, spaces.MultiDiscrete):
            parts = parts + space.start
        return parts.astype(space.dtype)


def _sizes(space: Space) -> tuple[int, ...]:
    if isinstance(space, gymnasium.spaces.MultiDiscrete):
        return tuple(int(n) for n in space.nvec.reshape(-1))
    return (2,) * gymnasium.spaces.flatdim(space)


#: The entry that holds the flat observation.
OBSERVATION = "observation"


@dataclass(frozen=True)
class Seen:
    """``flat`` [num_envs, size]; ``mask`` [num_envs, num_actions] or None. Neither is memory of
    the environments, and neither is written to.
    """

    flat: Floats
    mask: Bools | None

    def replaced(self, which: Bools, other: Seen) -> Seen:
        """A copy with the rows ``which`` taken from ``other``."""
        mask = self.mask
        if mask is not None and other.mask is not None:
            mask = np.where(which[:, None], other.mask, mask)
        return Seen(np.where(which[:, None], other.flat, self.flat), mask)

    def freed(self, which: Bools) -> Seen:
        """A copy with every action possible in the rows ``which``, where nothing is decided."""
        return self if self.mask is None else Seen(self.flat, self.mask | which[:, None])

    def tensors(self, device: torch.device) -> Observation:
        seen = {OBSERVATION: torch.from_numpy(self.flat).to(device)}
        if self.mask is not None:
            seen[ACTION_MASK] = torch.from_numpy(self.mask).to(device)
        return seen


@dataclass(frozen=True, kw_only=True)
class Look:
    """How to read what the environments ``name`` return."""

    name: str
    num_envs: int
    reader: Reader
    actions: Actions
    has_mask: bool

    def entries(self) -> dict[str, Entry]:
        """The entries as ``EnvSpec.observation`` has them."""
        entries = {OBSERVATION: Entry((self.reader.size,))}
        if self.has_mask:
            entries[ACTION_MASK] = Entry((self._num_actions(),), torch.bool)
        return entries

    def read(self, batch: Any, infos: Mapping[str, Any]) -> Seen:
        """Read a batch; in rows without a mask of their own every action is possible."""
        flat = self.reader.flat(batch, self.num_envs)
        if self.has_mask:
            return Seen(flat, self._mask(batch, infos))
        if ACTION_MASK in infos:
            raise UsageError(f"{self.name}: it gives an {ACTION_MASK} at steps but not at resets.")
        return Seen(flat, None)

    def finals(self, seen: Seen, ended: Bools, infos: Mapping[str, Any]) -> Seen:
        """Same-step mode: ``seen`` with the rows that ended as they were before the reset."""
        if "final_obs" not in infos:
            raise UsageError(
                f"{self.name}: its autoreset mode is same-step, but an episode has ended and "
                "the infos have no 'final_obs': its value cannot be estimated."
            )
        flat = seen.flat.copy()
        for row in np.flatnonzero(ended):
            flat[row] = self.reader.flat_one(infos["final_obs"][row])
        return Seen(flat, seen.mask).freed(ended)

    def _mask(self, batch: Any, infos: Mapping[str, Any]) -> Bools:
        if self.reader.mask_space is not None:
            return self._sized(np.array(batch[ACTION_MASK], np.bool_).reshape(self.num_envs, -1))
        mask = np.ones((self.num_envs, self._num_actions()), np.bool_)
        given = infos.get(ACTION_MASK)
        if given is None:
            return mask
        rows = np.flatnonzero(infos.get(f"_{ACTION_MASK}", np.ones(self.num_envs, np.bool_)))
        for row in rows:
            mask[row] = self._sized(np.asarray(given[row], np.bool_).reshape(1, -1))
        return mask

    def _sized(self, mask: Bools) -> Bools:
        if mask.shape[1] != self._num_actions():
            raise UsageError(
                f"{self.name}: its {ACTION_MASK} has {mask.shape[1]} entries, and there are "
                f"{self._num_actions()} actions."
            )
        return mask

    def _num_actions(self) -> int:
        if not isinstance(self.actions, Discrete):
            raise UsageError(f"{self.name}: it gives an {ACTION_MASK}, but actions are numbers.")
        return self.actions.num_actions


Lengths = NDArray[np.int64]


class History:
    """The actions of every environment's episode so far."""

    def __init__(self, num_envs: int, actions: Actions) -> None:
        #: Steps of each environment's episode, [num_envs].
        self.length: Lengths = np.zeros(num_envs, np.int64)
        self._rows = np.arange(num_envs)
        self._actions: NDArray[Any] = _empty(num_envs, 64, actions)

    def append(self, actions: NDArray[Any]) -> None:
        """Record that ``actions`` [num_envs, ...] were taken."""
        if self.length.max() == self._actions.shape[1]:
            self._actions = np.concatenate([self._actions, np.zeros_like(self._actions)], axis=1)
        self._actions[self._rows, self.length] = actions
        self.length = self.length + 1

    def clear(self, which: Bools) -> None:
        """Record that these environments start an episode."""
        self.length = np.where(which, 0, self.length)

    def state(self) -> dict[str, Tensor]:
        """Tensors ``length`` [num_envs] and ``actions`` [num_envs, longest, ...], padded with 0."""
        longest = int(self.length.max())
        actions = self._actions[:, :longest].copy()
        actions[np.arange(longest) >= self.length[:, None]] = 0
        return {"length": torch.tensor(self.length), "actions": torch.from_numpy(actions)}

    @staticmethod
    def of(state: Mapping[str, Tensor], actions: Actions) -> History:
        """Make a history from ``state``, which may be padded further."""
        lengths = np.array(state["length"].cpu().numpy(), np.int64)
        history = History(len(lengths), actions)
        longest = int(lengths.max())
        history._actions = _empty(len(lengths), max(64, longest), actions)
        history._actions[:, :longest] = state["actions"][:, :longest].cpu().numpy()
        history.length = lengths
        return history

    def rounds(self) -> Iterator[Round]:
        """Restarts and steps of all environments at once that bring each to its point.

        All must be stepped together, but they have different numbers of steps to replay. Those with
        fewer repeat their own first steps in the meantime, which are known to be possible and not
        to end the episode. Those without any step take action 0 from the start; whether that ends
        the episode is not known, so they restart before each one and once more at the end.
        """
        longest = int(self.length.max())
        spare = longest - self.length
        idle = self.length == 0
        for step in range(longest):
            spent = step % np.maximum(self.length, 1)
            position = np.where(step < spare, spent, step - spare)
            position[idle] = 0
            actions = self._actions[self._rows, position].copy()
            actions[idle] = 0
            yield Round(restart=idle | (position == 0), actions=actions)


class Round(NamedTuple):
    """First restart the rows of ``restart`` [num_envs], then step with ``actions``."""

    restart: Bools
    actions: NDArray[Any]


def _empty(num_envs: int, capacity: int, actions: Actions) -> NDArray[Any]:
    if isinstance(actions, Discrete):
        return np.zeros((num_envs, capacity), np.int64)
    return np.zeros((num_envs, capacity, len(actions.low)), np.float32)
