"""Gradients sent while the backward still runs, bucket by bucket, as DistributedDataParallel does.

Li et al. 2020, "PyTorch Distributed: experiences on accelerating data parallel training". Gradients
become ready from the last layer to the first; a bucket is sent when it is full and the one before
it has gone. What is not yet sent when the backward ends is *exposed*: the step waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from muster.plan.units import Bytes, Seconds

#: torch's defaults: 1 MiB first, so that sending starts early, then 25 MiB.
FIRST_BUCKET = Bytes(2**20)
BUCKET = Bytes(25 * 2**20)


def buckets_of(
    size: Bytes, first: Bytes = FIRST_BUCKET, bucket: Bytes = BUCKET
) -> tuple[Bytes, ...]:
    """The sizes of the buckets, in the order in which they are sent; they add up to ``size``."""
    if size <= first:
        return (size,)
    rest = size - first
    whole = int(rest / bucket)
    last = rest - bucket * whole
    return (first, *[bucket] * whole, *([last] if last.value > 0 else []))


def exposed(
    buckets: Sequence[Bytes], backward: Seconds, send: Callable[[Bytes], Seconds]
) -> Seconds:
    """How long the step waits for gradients after a backward that takes ``backward``.

    Gradients are taken to become ready evenly. ``send``: the time of an all-reduce. Never less
    than the last bucket's own time, never more than that of all of them.
    """
    total = sum(bucket.value for bucket in buckets)
    ready, line_free = 0.0, Seconds(0.0)
    for bucket in buckets:
        ready += bucket.value
        is_full_at = backward * (ready / total if total > 0 else 1.0)
        line_free = max(is_full_at, line_free) + send(bucket)
    return max(line_free - backward, Seconds(0.0))
