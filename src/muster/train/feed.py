"""Batches in the data order (``rank.seeding``), from any position, with any number of loaders."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any, Literal, NamedTuple

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    get_worker_info,
)

from muster.base.errors import TargetError
from muster.base.settings import usable_cpu_count
from muster.rank.process_group import Gang
from muster.rank.seeding import (
    DATA,
    DataOrder,
    Position,
    Untouched,
    mix,
    seed_everything,
    seed_sample,
)
from muster.train.config import BatchPlan
from muster.train.task import Split, Task, is_strided

#: So many batches are fetched in a row, and more of small ones: as many as these bytes hold.
_FEWEST, _MOST = 4, 16
_FETCHED_BYTES = 1 << 16
_PREFETCHED = 2
#: To measure loaders: so many batches, after so many that fill the queues.
_BATCHES, _WARM = 12, 4

Collate = Callable[[Sequence[Any]], Any]


class Order(NamedTuple):
    """A micro-batch to fetch. ``start``: the place of its first sample in the epoch."""

    epoch: int
    start: int
    indices: list[int]


class Batch(NamedTuple):
    """A collated micro-batch of ``size`` samples; ``data`` is None when there are none."""

    data: Any
    size: int


class Fetcher(Dataset[Any]):
    """Fetches and collates whole micro-batches, seeding what is random about them.

    A data set that draws random numbers is seeded for every item from (seed, epoch, index), so
    that its augmentation is the same whatever batch, rank or loader process it falls to. One
    that was not seen to draw any is only seeded once per batch, and that in loader processes:
    in the training process torch is seeded at every step, and checkpoints keep the rest.
    """

    def __init__(
        self, dataset: Dataset[Any], collate: Collate, seed: int, *, is_random: bool
    ) -> None:
        self._dataset = dataset
        self._collate = collate
        self._seed = seed
        self.is_random = is_random
        self._many = getattr(dataset, "__getitems__", None)
        self._columns = _columns(dataset, collate)

    def __getitem__(self, order: Order) -> Batch:
        if self._columns is not None:
            tensors, rows = self._columns
            chosen = torch.tensor(order.indices)
            if rows is not None:
                chosen = rows[chosen]
            return Batch([column[chosen] for column in tensors], len(order.indices))
        samples = self._samples(order)
        return Batch(self._collate(samples) if samples else None, len(samples))

    def _samples(self, order: Order) -> Sequence[Any]:
        if self.is_random:
            found = []
            for index in order.indices:
                seed_sample(mix(self._seed, DATA, order.epoch, index))
                found.append(self._dataset[index])
        else:
            if get_worker_info() is not None:
                seed_sample(mix(self._seed, DATA, order.epoch, -1 - order.start))
            many, dataset = self._many, self._dataset
            found = many(order.indices) if many else [dataset[index] for index in order.indices]
        return [sample for sample in found if sample is not None]


def _columns(
    dataset: Dataset[Any], collate: Collate
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None] | None:
    """The tensors of a TensorDataset, and which of their rows are meant, where collating means
    stacking: also of a part of one, as random_split makes it, and of a class that gives its items
    as TensorDataset does.

    A whole batch of rows is then taken at once: the same batch at a tenth of the time.
    """
    rows: torch.Tensor | None = None
    while type(dataset) is Subset:
        of_part = torch.as_tensor(dataset.indices, dtype=torch.int64)
        rows = of_part if rows is None else of_part[rows]
        dataset = dataset.dataset
    is_stacking = getattr(collate, "__func__", None) is Task.collate
    if not is_stacking or not isinstance(dataset, TensorDataset):
        return None
    is_own = type(dataset).__getitem__ is TensorDataset.__getitem__
    if not is_own or hasattr(dataset, "__getitems__"):
        return None
    return (dataset.tensors, rows) if all(map(is_strided, dataset.tensors)) else None


class Window(NamedTuple):
    """One optimizer step of one rank: ``rounds`` micro-batches, which ``Feed.take`` gives.

    ``planned`` samples from ``position`` on, to ``after``, belong to the global batch on all ranks
    together.
    """

    position: Position
    after: Position
    planned: int
    rounds: int


class _Orders:
    """The micro-batches of one rank from ``position`` on, without an end."""

    def __init__(self, order: DataOrder, plan: BatchPlan, rank: int, position: Position) -> None:
        self._order = order
        self._plan = plan
        self._rank = rank
        self._position = position

    def __iter__(self) -> Iterator[Order]:
        position = self._position
        count, windows = 0, []
        while True:
            planned = self._order.window(position, self._plan.global_batch)
            if planned != count:  # seldom: at an epoch's end and after it
                count, windows = planned, self._plan.windows(planned, self._rank)
            for start, end in windows:
                first = position.offset + start
                indices = self._order.indices(position.epoch, first, position.offset + end)
                yield Order(position.epoch, first, indices)
            position = self._order.after(position, count)


class Feed:
    """Windows one after the other, on ``device``; ``at`` moves to a position in constant time.

    ``draws_here``: fetching draws from this process's generators.
    """

    def __init__(
        self,
        fetcher: Fetcher,
        order: DataOrder,
        rank: int,
        device: torch.device,
        num_workers: int = 0,
    ) -> None:
        self._fetcher = fetcher
        self.draws_here = fetcher.is_random and num_workers == 0
        self.order = order
        self._rank = rank
        self._num_workers = num_workers
        self._is_cuda = device.type == "cuda"
        # Batches of loaders go on as they come: a row would drain their queues.
        self._move: Callable[[Iterator[Batch]], Iterator[Batch]] = (
            iter if num_workers else _in_a_row
        )
        if self._is_cuda:
            side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._move = partial(_copied_ahead, device, side)
        self._stream: Iterator[Batch] = iter(())
        self._position = Position(0, 0)
        self.plan: BatchPlan

    def at(self, position: Position, plan: BatchPlan) -> None:
        """Go on at ``position`` with ``plan``; what was fetched ahead is dropped."""
        self.close()
        self._position, self.plan = position, plan
        orders = _Orders(self.order, plan, self._rank, position)
        if self._num_workers == 0:
            fetch = self._fetcher.__getitem__
            self._stream = self._move(fetch(order) for order in orders)
        else:
            self._stream = self._move(iter(self._loader(orders)))

    def window(self) -> Window:
        """The next optimizer step; ``take`` is then called ``rounds`` times."""
        position = self._position
        planned = self.order.window(position, self.plan.global_batch)
        self._position = after = self.order.after(position, planned)
        return Window(position, after, planned, self.plan.rounds(planned))

    def take(self) -> Batch:
        """The next micro-batch, on the device."""
        return next(self._stream)

    def close(self) -> None:
        stream, self._stream = self._stream, iter(())
        close = getattr(stream, "close", None)
        if close is not None:
            with suppress(RuntimeError):
                close()

    def _loader(self, orders: _Orders) -> DataLoader[Batch]:
        return DataLoader(
            self._fetcher,
            sampler=orders,
            batch_size=None,
            num_workers=self._num_workers,
            pin_memory=self._is_cuda,
            prefetch_factor=_PREFETCHED,
        )


def _in_a_row(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Fetch some batches in a row. On a CPU no batch has to be copied to a device.

    So the code for fetching and that of the model stay in the processor's caches, which saves about
    a tenth of a step on small models. The number follows from the size of the first batch and not
    from a clock: two runs of a training fetch the same at the same time.
    """
    for first in batches:
        yield first
        count = _count_in_a_row(first)
        while some := list(islice(batches, count)):
            yield from some


def _count_in_a_row(batch: Batch) -> int:
    parts = tree_leaves(batch.data)
    if not all(map(is_strided, parts)):
        return _FEWEST
    num_bytes: int = sum(part.nbytes for part in parts)
    return max(_FEWEST, min(_MOST, _FETCHED_BYTES // max(1, num_bytes)))


def _copied_ahead(
    device: torch.device, side: torch.cuda.Stream, batches: Iterator[Batch]
) -> Iterator[Batch]:
    """Copy the next batch on the stream ``side`` while the current one is worked on."""

    def handed(batch: Batch, is_there: torch.cuda.Event) -> Batch:
        current = torch.cuda.current_stream(device)
        current.wait_event(is_there)
        _record(batch.data, current)  # its memory is not reused before this stream is done with it
        return batch

    waiting: tuple[Batch, torch.cuda.Event] | None = None
    for batch in batches:
        # What is not made of plain tensors is copied by the stream that uses it: nothing could
        # keep its memory from being used again too early.
        stream = side if _is_plain(batch.data) else torch.cuda.current_stream(device)
        with torch.cuda.stream(stream):
            moved = Batch(to_device(batch.data, device), batch.size)
            is_there = torch.cuda.Event()  # type: ignore[no-untyped-call]
            is_there.record()
        if waiting is not None:
            yield handed(*waiting)
        waiting = (moved, is_there)
    if waiting is not None:
        yield handed(*waiting)


def _is_plain(data: Any) -> bool:
    """Whether all are plain tensors in lists, tuples and dicts, where ``_record`` finds them."""
    if isinstance(data, PackedSequence):
        return False
    if isinstance(data, dict):
        return all(map(_is_plain, data.values()))
    if isinstance(data, list | tuple):
        return all(map(_is_plain, data))
    return is_strided(data) or not hasattr(data, "to")


def to_device(data: Any, device: torch.device) -> Any:
    """``data`` with every tensor in it on ``device``; the same object types around them."""
    if isinstance(data, torch.Tensor):
        if device.type == "cuda" and data.device.type == "cpu":
            data = _pinned(data)
        return data.to(device, non_blocking=True)
    if isinstance(data, PackedSequence):  # a tuple whose batch_sizes must stay on the CPU
        return data.to(device)  # type: ignore[arg-type] # torch's own annotation is too narrow
    if isinstance(data, dict):
        moved = copy.copy(data)  # libraries make dicts of their own, with attributes
        for key, value in data.items():
            moved[key] = to_device(value, device)
        return moved
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(to_device(value, device) for value in data))
    if isinstance(data, list | tuple):
        return type(data)(to_device(value, device) for value in data)
    if hasattr(data, "to") and callable(data.to):
        return data.to(device)
    return data


def _pinned(data: torch.Tensor) -> torch.Tensor:
    """A copy in pinned memory, from which a GPU copies by itself while the host goes on."""
    try:
        return data.pin_memory()  # itself where a data loader has done it
    except RuntimeError:  # no more can be pinned
        return data


def _record(data: Any, stream: torch.cuda.Stream) -> None:
    if isinstance(data, torch.Tensor):
        if data.is_cuda and is_strided(data):
            data.record_stream(stream)
    elif isinstance(data, dict | list | tuple):
        for value in data.values() if isinstance(data, dict) else data:
            _record(value, stream)


def open_dataset(task: Task, split: Split, seed: int) -> Dataset[Any] | None:
    """Make the data set of a split; random numbers for it are the same on all ranks and starts."""
    seed_everything(mix(seed, DATA, *split.encode()))
    return task.dataset(split)


def check_dataset(dataset: Any, split: str, task_name: str) -> int:
    """The number of samples. Raises TargetError for an empty or not map-style data set."""
    try:
        count = len(dataset)
        is_indexed = not isinstance(dataset, IterableDataset)  # which inherits a __getitem__
        _ = type(dataset).__getitem__
    except (TypeError, AttributeError):
        is_indexed = False
    if not is_indexed:
        raise TargetError(
            f"{task_name}.dataset({split!r}) gives a {type(dataset).__name__}, which has no "
            "length or cannot be indexed.",
            hint="give a map-style data set, one with __len__ and __getitem__: only there a "
            "resumed run skips nothing, and ranks share the samples evenly.",
        )
    if count == 0:
        raise TargetError(
            f"{task_name}.dataset({split!r}) is empty: there is nothing to learn from.",
            hint="check the path and the filters of the data set.",
        )
    return int(count)


def choose_num_workers(
    wanted: int | Literal["auto"],
    fetcher: Fetcher,
    order: DataOrder,
    plan: BatchPlan,
    gang: Gang,
    say: Callable[[str], None],
) -> int:
    """``wanted``, or the fastest of a few settings as rank 0 measures it, the same on all ranks."""
    if wanted != "auto":
        return wanted
    if not gang.is_first:
        return int(gang.council.share(None))
    cores = max(1, usable_cpu_count() // gang.num_ranks)
    rates = {n: _rate(n, fetcher, order, plan) for n in sorted({0, 1, 2, 4, 8}) if n <= cores}
    best = max(rates, key=lambda n: rates[n])
    if rates[best] < 1.2 * rates[0]:  # processes that hardly help are not worth their memory
        best = 0
    listing = ", ".join(f"{n}: {rate:,.0f}" for n, rate in rates.items())
    say(f"loaders    {best} processes per rank (samples/s measured with {listing})")
    return int(gang.council.share(best))


def _rate(num_workers: int, fetcher: Fetcher, order: DataOrder, plan: BatchPlan) -> float:
    """Samples per second, after the first batches have filled the queues."""
    with Untouched():
        if num_workers == 0:
            stream: Iterator[Batch] = (fetcher[o] for o in _orders(order, plan))
        else:
            loader: DataLoader[Batch] = DataLoader(
                fetcher,
                sampler=_orders(order, plan),
                batch_size=None,
                num_workers=num_workers,
            )
            stream = iter(loader)
        for _ in islice(stream, _WARM):
            pass
        began = time.perf_counter()
        count = sum(batch.size for batch in stream)
        return count / (time.perf_counter() - began)


def _orders(order: DataOrder, plan: BatchPlan) -> list[Order]:
    size = min(plan.micro_batch, order.num_samples)
    starts = [i * size % max(1, order.num_samples - size + 1) for i in range(_BATCHES + _WARM)]
    return [Order(0, start, order.indices(0, start, start + size)) for start in starts]
