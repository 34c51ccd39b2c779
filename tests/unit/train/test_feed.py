"""Fetching: the same batches whichever way they are taken."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.train.toy_tasks import Toy
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

from muster.rank.seeding import DataOrder, Position
from muster.train.config import BatchPlan
from muster.train.feed import Feed, Fetcher, Order, _is_plain, to_device
from muster.train.task import Task

TABLE = TensorDataset(torch.randn(20, 3, 2), torch.arange(20), torch.rand(20) > 0.5)


class OneByOne(TensorDataset):
    """Gives its items in its own way, so that it is no table."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        x, *rest = super().__getitem__(index)
        return (x + 1, *rest)


class Named(TensorDataset):
    """A table with another name."""


class Doubles(Task):
    def collate(self, samples: Any) -> Any:
        return [2 * column for column in default_collate(list(samples))[:2]]

    model = dataset = loss = score = None  # type: ignore[assignment]


def fetch(data: TensorDataset, task: Any, indices: list[int]) -> list[torch.Tensor]:
    batch = Fetcher(data, task.collate, 0, is_random=False)[Order(0, 0, indices)]
    assert batch.size == len(indices)
    found: list[torch.Tensor] = batch.data
    return found


PART = Subset(TABLE, [5, 3, 19, 3, *range(16)])


@pytest.mark.parametrize(
    "data",
    [TABLE, Named(*TABLE.tensors), OneByOne(*TABLE.tensors), PART,
     Subset(PART, torch.arange(19, -1, -1)), Subset(OneByOne(*TABLE.tensors), range(20))],  # type: ignore[arg-type]
    ids=["table", "its subclass", "items of its own", "a part", "a part of a part", "part of own"],
)  # fmt: skip
@given(indices=st.lists(st.integers(0, 19), min_size=1, max_size=30))
def test_a_batch_is_what_torch_makes_of_the_items(data: Any, indices: list[int]) -> None:
    ours = fetch(data, Toy(), indices)
    theirs = default_collate([data[index] for index in indices])
    assert type(ours) is type(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


ITEMS = [
    [(torch.ones(2), torch.tensor(1)), (torch.zeros(2), torch.tensor(2))],
    [(torch.ones(2), 3), (torch.zeros(2), 4)],
    [[torch.ones(2)], [torch.zeros(2)]],
    [torch.ones(2), torch.zeros(2)],
    [{"x": torch.ones(2)}, {"x": torch.zeros(2)}],
    [(nn.Parameter(torch.ones(2)),), (nn.Parameter(torch.zeros(2)),)],
    [("a", torch.ones(1)), ("b", torch.zeros(1))],
]


@pytest.mark.parametrize("items", ITEMS)
def test_samples_of_any_kind_are_collated_as_torch_does(items: list[Any]) -> None:
    ours, theirs = Task.collate(Toy(), items), default_collate(items)
    assert repr(ours) == repr(theirs)


@pytest.mark.parametrize(
    "items",
    [
        [(torch.ones(2),), (torch.ones(3),)],
        [(torch.ones(2), torch.ones(1)), (torch.ones(2),)],
        [(torch.ones(2),), (3.0,)],
    ],
)
def test_uneven_samples_are_refused_in_torchs_words(items: list[Any]) -> None:
    with pytest.raises((RuntimeError, TypeError)) as theirs:
        default_collate(items)
    with pytest.raises(theirs.type, match=re.escape(str(theirs.value))):
        Task.collate(Toy(), items)


def test_a_collate_of_ones_own_is_always_called() -> None:
    x, y = fetch(TABLE, Doubles(), [3, 1])
    assert torch.equal(x, 2 * TABLE.tensors[0][[3, 1]])
    assert torch.equal(y, torch.tensor([6, 2]))


def test_packed_sequences_move_whole_and_not_by_a_stream_of_their_own() -> None:
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    moved = to_device({"x": packed, "y": torch.ones(2)}, torch.device("cpu"))
    assert torch.equal(moved["x"].data, packed.data)
    assert not _is_plain({"x": packed})
    assert _is_plain([torch.ones(1), {"a": (torch.ones(1), 3, "text", None)}])


def test_a_batch_is_a_copy() -> None:
    x, *_ = fetch(TABLE, Toy(), [4])
    x.zero_()
    assert TABLE.tensors[0][4].abs().sum() > 0


@pytest.mark.parametrize(("width", "fetched"), [(4, 17), (4000, 5)])
def test_small_batches_are_fetched_in_longer_rows(width: int, fetched: int) -> None:
    """The first, whose size decides, and a row; the order is the same either way."""
    seen: list[int] = []

    class Noting(Dataset[Any]):
        def __getitem__(self, index: int) -> torch.Tensor:
            seen.append(index)
            return torch.full((width,), float(index))

        def __len__(self) -> int:
            return 100

    order = DataOrder(100, seed=0)
    fetcher = Fetcher(Noting(), torch.stack, 0, is_random=False)  # type: ignore[arg-type]
    feed = Feed(fetcher, order, 0, torch.device("cpu"))
    plan = BatchPlan(global_batch=2, micro_batch=2, accumulation=1, shares=(1.0,))
    feed.at(Position(0, 0), plan)
    taken = [int(row[0]) for _ in range(2) for row in feed.take().data]
    assert len(seen) == 2 * fetched
    assert taken == order.indices(0, 0, 4)


class BrokenFrom(Dataset[Any]):
    """Gives the items of a set, and an error for all others."""

    def __init__(self, whole: set[int]) -> None:
        self.whole = whole

    def __getitem__(self, index: int) -> torch.Tensor:
        if index not in self.whole:
            raise ValueError("fetched too early")
        return torch.tensor([index])

    def __len__(self) -> int:
        return 100


def test_batches_of_loaders_are_handed_on_as_they_come() -> None:
    """A row of them would drain the loaders' queues: they would stand idle while it is used."""
    order = DataOrder(100, seed=0)
    data = BrokenFrom(set(order.indices(0, 0, 6)))
    fetcher = Fetcher(data, torch.stack, 0, is_random=False)  # type: ignore[arg-type]
    feed = Feed(fetcher, order, 0, torch.device("cpu"), num_workers=1)
    plan = BatchPlan(global_batch=2, micro_batch=2, accumulation=1, shares=(1.0,))
    feed.at(Position(0, 0), plan)
    taken = [int(row[0]) for _ in range(3) for row in feed.take().data]
    feed.close()
    assert taken == order.indices(0, 0, 6)
