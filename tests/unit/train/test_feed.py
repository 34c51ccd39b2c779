"""Fetching: the same batches whichever way they are taken."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.train.toy_tasks import Toy
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import TensorDataset, default_collate

from muster.train.feed import Fetcher, Order, _is_plain, to_device
from muster.train.task import Task

TABLE = TensorDataset(torch.randn(20, 3, 2), torch.arange(20), torch.rand(20) > 0.5)


class OneByOne(TensorDataset):
    """Not recognised as a table."""


class Doubles(Task):
    def collate(self, samples: Any) -> Any:
        return [2 * column for column in default_collate(list(samples))[:2]]

    model = dataset = loss = score = None  # type: ignore[assignment]


def fetch(data: TensorDataset, task: Any, indices: list[int]) -> list[torch.Tensor]:
    batch = Fetcher(data, task.collate, 0, is_random=False)[Order(0, 0, indices)]
    assert batch.size == len(indices)
    found: list[torch.Tensor] = batch.data
    return found


@given(indices=st.lists(st.integers(0, 19), min_size=1, max_size=30))
def test_a_table_gives_the_batch_that_its_rows_give(indices: list[int]) -> None:
    at_once = fetch(TABLE, Toy(), indices)
    one_by_one = fetch(OneByOne(*TABLE.tensors), Toy(), indices)
    assert type(at_once) is type(one_by_one)
    for ours, theirs in zip(at_once, one_by_one, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


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
