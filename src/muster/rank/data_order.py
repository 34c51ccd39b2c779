"""Which sample comes when: a pure function of (seed, epoch, position) over the whole data set.

The number of ranks, micro-batches and loader processes does not enter, so the same samples come
in the same order on any of them, and a position is enough to go on from.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from muster.rank.seeding import ORDER, mix


class Position(NamedTuple):
    """``epoch`` from 0; ``offset``: samples of it that have been consumed."""

    epoch: int
    offset: int


class DataOrder:
    """The order of ``num_samples`` samples; the permutation of the last epoch asked for is kept."""

    def __init__(self, num_samples: int, seed: int, *, shuffle: bool = True) -> None:
        self.num_samples = num_samples
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = -1
        self._permutation = torch.empty(0, dtype=torch.int64)

    def indices(self, epoch: int, start: int, end: int) -> list[int]:
        """The samples at positions ``start`` to ``end`` (exclusive) of ``epoch``."""
        if not self._shuffle:
            return list(range(start, end))
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(mix(self._seed, ORDER, epoch))
            self._permutation = torch.randperm(self.num_samples, generator=generator)
            self._epoch = epoch
        indices: list[int] = self._permutation[start:end].tolist()
        return indices

    def after(self, position: Position, count: int) -> Position:
        """The position ``count`` samples on, never crossing an epoch's end but by reaching it."""
        offset = position.offset + count
        if offset >= self.num_samples:
            return Position(position.epoch + 1, 0)
        return Position(position.epoch, offset)

    def window(self, position: Position, global_batch: int) -> int:
        """Samples of the global batch at ``position``: fewer at an epoch's end."""
        return min(global_batch, self.num_samples - position.offset)
