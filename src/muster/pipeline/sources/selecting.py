"""Skip, limit and shuffle: from the pieces of an input to the shards of a run."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

from muster.pipeline.sources.cut_index import CutIndex, Piece
from muster.pipeline.sources.model import Selection, Shard


def shards_of(index: CutIndex, selection: Selection) -> Iterator[Shard]:
    """The selected rows. ``place`` is (place, line, count) of the whole piece and the row in it,
    in its shuffled order where there is one, with which the shard begins.
    """
    start = selection.skip
    stop = None if selection.limit is None else start + selection.limit
    seen = order = 0
    for piece in _in_order(index, selection.shuffle_seed):
        count = piece.cut.num_rows
        begin = min(max(0, start - seen), count)
        end = count if stop is None else min(count, stop - seen)
        seen += count
        if begin < end:
            place = (piece.cut.place, piece.cut.line, count, begin)
            yield Shard(order, piece.first + begin, end - begin, piece.file, place)
            order += 1
        if stop is not None and seen >= stop:
            return


def permutation(count: int, *key: int) -> list[int]:
    """The numbers below ``count`` in an order that only ``key`` decides, on every machine."""
    import numpy as np

    seed = ",".join(map(str, (count, *key))).encode()
    keys = np.frombuffer(hashlib.shake_128(seed).digest(8 * count), "<u8")
    order: list[int] = np.argsort(keys, kind="stable").tolist()
    return order


def _in_order(index: CutIndex, seed: int | None) -> Iterable[Piece]:
    if seed is None:
        return index
    return (index[number] for number in permutation(len(index), seed))
