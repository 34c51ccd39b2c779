"""Random streams and the order of the data, as functions of counters.

A resumed run therefore draws what it would have drawn. The number of ranks, micro-batches and
loader processes does not enter into the order: the same samples come in the same order on any of
them, and a position is enough to go on from.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from muster.gang.topology import set_default

_MASK = (1 << 64) - 1
#: Streams that never share a seed.
MODEL, ORDER, DATA, STEP = 1, 2, 3, 4


def mix(*numbers: int) -> int:
    """A 63-bit seed from a tuple of integers (splitmix64, Steele et al. 2014)."""
    state = 0x9E3779B97F4A7C15
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


def seed_torch(seed: int, device: torch.device) -> None:
    """Seed torch's generators of the CPU and of ``device``; about 2 µs on a CPU."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)


def seed_everything(seed: int) -> None:
    """Seed Python's, numpy's (where it is loaded) and torch's generators."""
    random.seed(seed)
    torch.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed & 0xFFFFFFFF)


def seed_sample(seed: int) -> None:
    """Seed what a data set draws from on the CPU; for a batch, or a random data set's item."""
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed & 0xFFFFFFFF)


def seed_all(seed: int, device: torch.device) -> None:
    """Seed every generator that a step may draw from."""
    seed_sample(seed)
    seed_torch(seed, device)


def use_deterministic() -> None:
    """Allow only deterministic kernels from here on; cuBLAS needs a variable for that."""
    set_default("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


def get_generators() -> dict[str, Any]:
    """Python's and numpy's generators as JSON values; torch's are functions of the step."""
    version, internal, gauss = random.getstate()
    record: dict[str, Any] = {"python": [version, list(internal), gauss]}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        record["numpy"] = [name, keys.tolist(), *rest]
    return record


def set_generators(record: Mapping[str, Any]) -> None:
    """The opposite of ``get_generators``."""
    version, internal, gauss = record["python"]
    random.setstate((version, tuple(internal), gauss))
    if "numpy" in record:
        import numpy

        name, keys, *rest = record["numpy"]
        numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), *rest))


class Untouched:
    """A context that puts the global generators back as they were."""

    def __enter__(self) -> Untouched:
        self._python = random.getstate()
        self._torch = torch.random.get_rng_state()
        self._numpy = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None
        return self

    def __exit__(self, *_: object) -> None:
        random.setstate(self._python)
        torch.random.set_rng_state(self._torch)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)

    def was_used(self) -> bool:
        """Whether anything has been drawn since the context was entered."""
        if random.getstate() != self._python:
            return True
        if not torch.equal(torch.random.get_rng_state(), self._torch):
            return True
        if self._numpy is None:
            return False
        now = sys.modules["numpy"].random.get_state()
        return bool(now[2] != self._numpy[2] or (now[1] != self._numpy[1]).any())


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
