"""Tasks that start processes of their own, by each of Python's ways."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any


@dataclass
class Item:
    value: int


def squared(item: Item) -> Item:
    return Item(item.value**2)


def pool(way: str) -> dict[str, int]:
    context = multiprocessing.get_context(way)
    with context.Pool(2) as workers:
        return {"sum": sum(item.value for item in workers.map(squared, map(Item, range(4))))}


def executor(way: str) -> dict[str, int]:
    context = multiprocessing.get_context(way)
    with ProcessPoolExecutor(2, mp_context=context) as workers:
        return {"sum": sum(item.value for item in workers.map(squared, map(Item, range(4))))}


class Numbers:
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index**2


def loader(way: str) -> dict[str, Any]:
    from torch.utils.data import DataLoader

    batches = DataLoader(Numbers(), batch_size=2, num_workers=2, multiprocessing_context=way)
    return {"sum": sum(int(batch.sum()) for batch in batches)}
