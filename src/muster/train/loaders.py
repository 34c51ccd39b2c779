"""How many loader processes to start: the fastest number, measured on the first batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Literal

from torch.utils.data import DataLoader

from muster.base.settings import usable_cpu_count
from muster.rank.process_group import Gang
from muster.rank.seeding import DataOrder, Untouched
from muster.train.batches import BatchPlan
from muster.train.feed import Batch, Fetcher, Order

_BATCHES = 12
_WARM = 4


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
