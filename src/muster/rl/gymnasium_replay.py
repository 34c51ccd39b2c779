"""Resuming in the middle of an episode by replaying it: its seed and its actions are kept.

Gymnasium's environments cannot be saved. One that is a function of its seed and of the actions
reaches the same point when it is started with the seed and given the actions once more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from muster.rl.environment import Actions, Discrete

Lengths = NDArray[np.int64]
Bools = NDArray[np.bool_]


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
