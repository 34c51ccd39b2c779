"""What a Gymnasium vector environment shows after a call: flat observations and action masks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from muster.base.errors import UsageError
from muster.rl.environment import ACTION_MASK, Actions, Discrete, Entry, Observation
from muster.rl.gymnasium_spaces import Bools, Floats, Reader

#: The entry that holds the flat observation.
OBSERVATION = "observation"


@dataclass(frozen=True)
class Seen:
    """``flat`` [num_envs, size]; ``mask`` [num_envs, num_actions] or None. Neither is memory of
    the environments, and neither is written to."""

    flat: Floats
    mask: Bools | None

    def replaced(self, which: Bools, other: Seen) -> Seen:
        """``other`` in these rows."""
        mask = self.mask
        if mask is not None and other.mask is not None:
            mask = np.where(which[:, None], other.mask, mask)
        return Seen(np.where(which[:, None], other.flat, self.flat), mask)

    def freed(self, which: Bools) -> Seen:
        """Every action possible in these rows: nothing is decided there."""
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
        """As ``EnvSpec.observation`` has them."""
        entries = {OBSERVATION: Entry((self.reader.size,))}
        if self.has_mask:
            entries[ACTION_MASK] = Entry((self._num_actions(),), torch.bool)
        return entries

    def read(self, batch: Any, infos: Mapping[str, Any]) -> Seen:
        """Rows without a mask of their own may do everything."""
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
