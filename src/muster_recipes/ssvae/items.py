"""The images of one training as items, each with the key of its noise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from muster_recipes.ssvae.labels import choose_labels
from muster_recipes.ssvae.noise import step_keys, uniforms
from muster_recipes.ssvae.pool import Pool

_NUM_CLASSES = 10
_KEY_RANGE = (-(2**63), 2**63 - 1)


class Item(NamedTuple):
    """``x`` float32 [D]; ``label`` int64; ``chance`` that it is known; ``key`` of its noise."""

    x: Tensor
    label: Tensor
    chance: Tensor
    key: Tensor


class Batch(NamedTuple):
    """Items put together; ``is_labelled`` bool [B]."""

    x: Tensor
    label: Tensor
    is_labelled: Tensor
    key: Tensor


class FixedLabels(Dataset[Item]):
    """Training images of which ``num_labels`` have a label, the same in every epoch."""

    def __init__(self, pool: Pool, num_labels: int, corruption_rate: float, seed: int) -> None:
        chosen = choose_labels(pool.labels, num_labels, corruption_rate, seed)
        self._x = pool.x
        self._labels = pool.labels.index_copy(0, chosen.index, chosen.given)
        self._chances = torch.zeros(len(pool.labels)).index_fill_(0, chosen.index, 1.0)

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int) -> Item:
        # The global generator is seeded for every epoch and item: the noise of an image is new in
        # every epoch, and the same on any number of ranks and loaders.
        key = torch.randint(*_KEY_RANGE, ())
        return Item(self._x[index], self._labels[index], self._chances[index], key)


class RedrawnLabels(Dataset[Item]):
    """The older protocol: a batch is labelled as a whole with probability ``num_labels`` / n, and
    every label of it is wrong with probability ``corruption_rate``; all drawn in every epoch."""

    def __init__(self, pool: Pool, num_labels: int, corruption_rate: float) -> None:
        self._pool = pool
        self._chance = torch.tensor(num_labels / len(pool.labels))
        self._corruption_rate = corruption_rate

    def __len__(self) -> int:
        return len(self._pool.labels)

    def __getitem__(self, index: int) -> Item:
        key = torch.randint(*_KEY_RANGE, ())
        label = self._pool.labels[index]
        if bool(torch.rand(()) < self._corruption_rate):
            label = (label + torch.randint(1, _NUM_CLASSES, ())) % _NUM_CLASSES
        return Item(self._pool.x[index], label, self._chance, key)


class TrueLabels(Dataset[Item]):
    """Images to evaluate on: the model is not told the label, and the noise is always the same."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._keys = step_keys([0], 0, len(pool.labels), "cpu")[0]

    def __len__(self) -> int:
        return len(self._pool.labels)

    def __getitem__(self, index: int) -> Item:
        never = torch.zeros(())
        return Item(self._pool.x[index], self._pool.labels[index], never, self._keys[index])


def collate(items: Sequence[Item]) -> Batch:
    """A batch; one draw, from the first item's key, is compared with every item's chance."""
    x, label, chance, key = (torch.stack(column) for column in zip(*items, strict=True))
    # Another stream than that of the noise, whose key this is. 0 < drawn < 1: fixed labels stay.
    drawn = uniforms(~key[:1], 1)[0]
    return Batch(x, label, drawn < chance, key)
