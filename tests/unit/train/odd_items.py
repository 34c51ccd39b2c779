"""Items of data sets that are no plain tensors, as people have them, each made from a number."""

from __future__ import annotations

import dataclasses
import enum
import logging
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy
import torch
from tests.unit.train.toy_tasks import Points, Toy
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from muster.base.journal import EVENTS


class Pair(NamedTuple):
    number: int
    text: str


@dataclass
class Sample:
    x: Tensor
    text: str
    source: object = dataclasses.field(default_factory=object, compare=False)


class Colour(enum.Enum):
    RED = 1


class Closed:
    """As an image whose file cannot be read any more."""

    def tobytes(self) -> bytes:
        raise OSError("image file is truncated")


class Willing:
    """Has an attribute of any name, as some configurations do."""

    def __getattr__(self, name: str) -> None:
        return None


class Unwilling:
    def __getattr__(self, name: str) -> None:
        raise RuntimeError(f"no {name}")


def itself(i: int) -> list[Any]:
    found: list[Any] = [i]
    found += [found, found]
    return found


def _full(i: int, n: int = 2) -> Tensor:
    return torch.full((n,), float(i))


def _many(i: int, **how: Any) -> Tensor:
    return torch.nested.nested_tensor([_full(i, n) for n in (1, 3)], **how)


#: Two of one kind that are made from different numbers are not the same.
COMPARED: dict[str, Callable[[int], Any]] = {
    "quantized": lambda i: torch.quantize_per_tensor(_full(i), 0.5, 0, torch.quint8),
    "quantized-by-channel": lambda i: torch.quantize_per_channel(
        torch.full((2, 3), float(i)), torch.ones(2), torch.zeros(2), 0, torch.qint8
    ),
    "nested": _many,
    "jagged": lambda i: _many(i, layout=torch.jagged),
    "coo": lambda i: torch.sparse_coo_tensor([[0, 3]], [float(i), 1.0], (5,)),
    "coo-twice": lambda i: torch.sparse_coo_tensor([[3, 3]], [float(i), 1.0], (5,)),
    "csr": lambda i: torch.sparse_csr_tensor([0, 1, 2], [0, 1], [float(i), 1.0], (2, 2)),
    "csc": lambda i: torch.sparse_csc_tensor([0, 1, 2], [0, 1], [float(i), 1.0], (2, 2)),
    "bsr": lambda i: torch.sparse_bsr_tensor([0, 1], [0], [[[float(i)]]], (1, 1)),
    "float8": lambda i: _full(i).to(torch.float8_e4m3fn),
    "bfloat16": lambda i: _full(i).bfloat16(),
    "uint16": lambda i: torch.tensor([i], dtype=torch.uint16),
    "bool": lambda i: torch.tensor([i == 3, True]),
    "conjugate": lambda i: torch.tensor([complex(i, i)]).conj(),
    "negative": lambda i: torch.tensor([complex(i, i)]).conj().imag,
    "trained": lambda i: nn.Parameter(_full(i)),
    "empty": lambda i: torch.zeros(i, 0),
    "objects": lambda i: numpy.array([i, "a", None, [1.0], Pair(1, "b")], dtype=object),
    "records": lambda i: numpy.array([(i, 1.5)], dtype=[("n", "i4"), ("x", "f8")]),
    "times": lambda i: numpy.array(["2026-01-01"], dtype="datetime64[D]") + i,
    "time": lambda i: numpy.datetime64("2026-01-01") + i,
    "texts": lambda i: numpy.array([f"a{i}"]),
    "complex-array": lambda i: numpy.array([1j * i]),
    "wide-array": lambda i: numpy.array([i], dtype=numpy.longdouble),
    "text": lambda i: f"a{i}",
    "surrogate": lambda i: f"a{i}\udc80",
    "bytes": lambda i: bytes([i]),
    "memory": lambda i: memoryview(bytes([i])),
    "complex": lambda i: complex(0, i),
    "dataclass": lambda i: Sample(_full(i), "a"),
    "namedtuple": lambda i: Pair(i, "a"),
    "dict": lambda i: {None: 1, Colour.RED: 2, 3: i, "a": 4, numpy.int64(5): 6},
    "two": lambda i: (Unwilling(), i),
}
#: Of these nothing is known but their type.
LEFT_OUT: dict[str, Callable[[int], Any]] = {
    "meta": lambda i: torch.empty(3, device="meta"),
    "set": lambda i: {str(i), "b"},
    "object": lambda i: object(),
    "closed": lambda i: Closed(),
    "willing": lambda i: Willing(),
    "unwilling": lambda i: Unwilling(),
    "class": lambda i: Sample,
    "huge": lambda i: 10**5000 + i,
    "keys": lambda i: {object(): i},
    "itself": itself,
}
MAKERS = {**COMPARED, **LEFT_OUT}


def make(name: str, i: int) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about kinds of tensors that may change
        return MAKERS[name](i)


class OddPoints(Points):
    def __getitem__(self, index: int) -> Any:
        odd = [make(name, index) for name in self.toy.kinds.split()]  # type: ignore[attr-defined]
        return (*super().__getitem__(index), odd)


class _Hearing(logging.Handler):
    """Puts what is said about events into a task."""

    def __init__(self, task: OddItems) -> None:
        super().__init__()
        self.task = task

    def emit(self, record: logging.LogRecord) -> None:
        self.task.heard += f"{record.getMessage()}\n"


@dataclass(kw_only=True)
class OddItems(Toy):
    """``kinds``: which of the above its items hold, beside what is learnt from."""

    kinds: str = ""
    is_turned: bool = False
    heard: str = ""

    def dataset(self, split: str) -> Dataset[Any] | None:
        if split == "train" and "RANK" in os.environ:
            EVENTS.setLevel(logging.DEBUG)
            EVENTS.addHandler(_Hearing(self))
        if split == "test":
            return None
        data = OddPoints(self.samples if split == "train" else self.val, 1, self)
        if self.is_turned and self._is_here():
            data.x, data.y = data.x.flip(0), data.y.flip(0)
        return data

    def collate(self, samples: Sequence[Any]) -> Any:
        return default_collate([sample[:3] for sample in samples])
