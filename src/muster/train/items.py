"""What items of a data set are like: random or not, the same again, and the same on all ranks.

What cannot be compared is left out: a look at the data never ends a training.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from hashlib import blake2b
from numbers import Number
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from muster.base.errors import MusterError
from muster.base.journal import EVENTS
from muster.base.shown_text import number_ranges
from muster.rank.process_group import Council
from muster.rank.seeding import Untouched, seed_sample

#: Whole numbers in tensors up to this size are labels or tokens, and not an image.
_FEW = 16
#: Parts of an item that are looked at: one may refer to a whole table, which would take minutes.
_MOST = 100_000
#: Of these at most it is said in which of them an item differs.
_MOST_NAMED = 1_000
#: What is written in one way everywhere, also by a class that derives from it.
_PLAIN = (bool, int, str, bytes)
#: Keys by whose text a dict is put into one order everywhere.
_KEYS = (str, bytes, Number, Enum, type(None))


def draws_random_numbers(dataset: Dataset[Any], num_samples: int) -> bool:
    """Whether fetching an item draws from Python's, numpy's or torch's global generators."""
    with Untouched() as generators:
        for index in sorted({0, num_samples // 2, num_samples - 1}):
            dataset[index]
        return generators.was_used()


def is_repeatable(dataset: Dataset[Any], num_samples: int) -> bool:
    """Whether an item is the same again with the same seeds.

    It is not where the data set holds a generator of its own, which cannot be seeded from here.
    """
    with Untouched():
        for index in sorted({0, num_samples - 1}):
            if not _is_same(_fetched(dataset, index), _fetched(dataset, index)):
                return False
    return True


def _fetched(dataset: Dataset[Any], index: int) -> Any:
    seed_sample(index)
    return dataset[index]


def _is_same(first: Any, second: Any) -> bool:
    """Whether two items are the same to the bit; what cannot be compared counts as the same."""
    one, other = (outline(item, is_exact=True) for item in (first, second))
    return one.is_like(other)


class Outline(NamedTuple):
    """What an item is: a digest of what must be exact, and sizes of what need not: another
    machine's decoder may give an image's other last digits. ``left_out``: the types of what could
    not be looked at.
    """

    exact: str
    sizes: list[float]
    left_out: tuple[str, ...] = ()

    def is_like(self, other: Outline) -> bool:
        if self.left_out != other.left_out:  # one of the two could not look at as much
            return True
        if self.exact != other.exact:
            return False
        pairs = zip(self.sizes, other.sizes, strict=True)
        return all(math.isclose(a, b, rel_tol=1e-3) or (a != a and b != b) for a, b in pairs)


def check_same_items(dataset: Dataset[Any], count: int, split: str, council: Council) -> None:
    """MusterError on every rank where three of ``count`` items are others on another rank."""
    if council.num_ranks == 1:
        return
    repeats = is_repeatable(dataset, count)
    places = sorted({0, count // 2, count - 1})
    with Untouched():
        own = [outline(_fetched(dataset, place)) for place in places]
    if council.rank == 0 and (left_out := {name for each in own for name in each.left_out}):
        kinds = ", ".join(sorted(left_out))
        EVENTS.debug("the ranks have not compared what %s data has of %s", split, kinds)
    found = council.gather(own if repeats else None)
    if None in found:  # they are others at each fetch; a training says so
        return
    for place, *each in zip(places, *found, strict=True):
        odd = [rank for rank, item in enumerate(each) if not item.is_like(each[0])]
        if odd:
            with Untouched():
                parts = council.gather(outlines(_fetched(dataset, place)))
            names = differing(parts[0], *(parts[rank] for rank in odd))
            ranks = ", ".join(number_ranges(odd))
            who = f"rank {ranks} has" if len(odd) == 1 else f"ranks {ranks} have"
            raise MusterError(
                f"The ranks do not have the same {split} data: {who} another item {place} than "
                f"rank 0{names and f', in {names}'}. Some samples would be taken twice, or under "
                "another label, and others never.",
                hint="give all ranks all of the data in one order. Files are listed in no certain "
                "order, and a set of texts has another in every process: sort both. A field of a "
                "data class that is another on each rank by design (its host, a time) is left out "
                "with `field(compare=False)`.",
            )


def outline(item: Any, *, is_exact: bool = False) -> Outline:
    """``is_exact``: to the bit, as within one process, and without sizes."""
    exact, sizes, left_out = blake2b(digest_size=8), list[float](), list[str]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about kinds of tensors that may change
        try:
            parts = list(itertools.islice(_parts(item, is_exact), _MOST + 1))
        except Exception:  # a class of its own, or a list that holds itself
            parts = [_LeftOut(type(item).__name__)]
    if len(parts) > _MOST:
        parts[_MOST] = _LeftOut(f"what is behind {_MOST:,} values")
    for part in parts:
        is_size = isinstance(part, float) and not is_exact
        if is_size:
            sizes.append(part)
        if isinstance(part, _LeftOut):
            left_out.append(part.kind)
        exact.update(f"{'' if is_size else repr(part)}\n".encode())
    return Outline(exact.hexdigest(), sizes, tuple(left_out))


class _LeftOut(NamedTuple):
    kind: str


def outlines(item: Any) -> dict[str, Outline]:
    """Of the first values that ``item`` is made of, by what finds them in it: ``[1]['label']``."""
    with suppress(Exception):  # a class of its own, or a list that holds itself
        leaves = itertools.islice(_leaves(item), _MOST_NAMED)
        return {name: outline(value) for name, value in leaves}
    return {}


def _leaves(item: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    inner: Iterable[tuple[str, Any]]
    if isinstance(item, dict) and all(isinstance(key, _KEYS) for key in item):
        inner = ((f"[{key!r}]", value) for key, value in item.items())
    elif isinstance(item, list | tuple):
        inner = ((f"[{place}]", value) for place, value in enumerate(item))
    elif dataclasses.is_dataclass(item) and not isinstance(item, type):
        compared = (each.name for each in dataclasses.fields(item) if each.compare)
        inner = ((f".{each}", getattr(item, each)) for each in compared)
    else:
        yield name, item
        return
    for part, value in inner:
        yield from _leaves(value, name + part)


def differing(first: Mapping[str, Outline], *others: Mapping[str, Outline]) -> str:
    """The names of what differs between items, at most five; "" where nothing has a name."""
    names = dict.fromkeys(itertools.chain(first, *others))
    told = [
        name for name in names if name and not all(
            name in first and name in other and first[name].is_like(other[name])
            for other in others
        )
    ]  # fmt: skip
    return ", ".join(told[:5]) + (f" and {len(told) - 5} more" if len(told) > 5 else "")


def _parts(item: Any, is_exact: bool) -> Iterator[Any]:
    """Texts, numbers and their likes that make up ``item``; floats need not be exact."""
    if isinstance(item, dict):
        if not all(isinstance(key, _KEYS) for key in item):
            yield _LeftOut(type(item).__name__)
            return
        # In one order, because they may have come from a set.
        for key, value in sorted(item.items(), key=lambda pair: str(pair[0])):
            yield str(key)
            yield from _parts(value, is_exact)
    elif isinstance(item, list | tuple):
        yield len(item)
        for value in item:
            yield from _parts(value, is_exact)
    elif dataclasses.is_dataclass(item) and not isinstance(item, type):
        yield type(item).__name__
        values = [getattr(item, each.name) for each in dataclasses.fields(item) if each.compare]
        yield from _parts(values, is_exact)
    else:
        try:
            yield from _parts_of_one(item, is_exact)
        except RecursionError:
            raise
        except Exception:  # of a kind that torch, or its library, has no such operation for
            yield _LeftOut(type(item).__name__)


def _parts_of_one(item: Any, is_exact: bool) -> Iterable[Any]:
    if item is None:
        return [None]
    if isinstance(item, str) and item.startswith(("/", "file://")):  # in a host's own folder
        return [item.rpartition("/")[2]]
    for plain in _PLAIN:
        if isinstance(item, plain):
            return [plain.__repr__(item)]
    if isinstance(item, float):
        return [float(item)]
    if isinstance(item, complex):
        return [item.real, item.imag]
    if isinstance(item, Tensor):
        parts = [_parts_of_tensor(each, is_exact) for each in _strided(item.detach())]
        return [str(item.dtype), *(part for each in parts for part in each)]
    kind = getattr(getattr(item, "dtype", None), "kind", None)
    if kind is None and callable(getattr(item, "tobytes", None)):  # an image
        data = torch.frombuffer(bytearray(item.tobytes() or b"0"), dtype=torch.uint8)
        return [type(item).__name__, *_parts_of_tensor(data, is_exact)]
    if kind is None or not hasattr(item, "__array__"):
        return [_LeftOut(type(item).__name__)]
    return _parts_of_array(item.__array__(), is_exact)


def _parts_of_array(array: Any, is_exact: bool) -> Iterable[Any]:
    kind = array.dtype.kind
    if array.dtype.hasobject or kind in "USV":  # Python's own values, texts, and records
        return itertools.chain([tuple(array.shape)], _parts(array.tolist(), is_exact))
    form = [str(array.dtype), tuple(array.shape)]
    if kind in "mM" or (is_exact and kind not in "fc"):  # times, and whole numbers
        return [*form, _digest(array.tobytes())]
    if kind not in "fc" and array.size <= _FEW:
        return [*form, array.tolist()]
    wide = array.astype("complex128" if kind == "c" else "float64", order="C")
    return [*form, *_parts_of_tensor(torch.as_tensor(wide), is_exact)]


def _strided(tensor: Tensor) -> Sequence[Tensor]:
    """The plain tensors that ``tensor`` is made of."""
    if tensor.is_nested:
        return [part for each in tensor.unbind() for part in _strided(each)]
    if tensor.is_quantized:
        return [tensor.dequantize()]
    if tensor.layout is torch.strided:
        return [tensor]
    shape = torch.tensor(tensor.shape)
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()
        return [shape, tensor.indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [shape, tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [shape, tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor.to_dense()]


def _parts_of_tensor(tensor: Tensor, is_exact: bool) -> list[Any]:
    form = [str(tensor.dtype), tuple(tensor.shape)]
    if tensor.numel() == 0:
        return form
    if is_exact:
        plain = tensor.resolve_conj().resolve_neg().cpu()
        plain = plain.clone(memory_format=torch.contiguous_format)  # one number may have any stride
        return [*form, _digest(plain.reshape(-1).view(torch.uint8).numpy().data)]
    if tensor.numel() <= _FEW and not (tensor.is_floating_point() or tensor.is_complex()):
        return [*form, tensor.tolist()]
    wide = (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).double()
    typical = float(wide.square().mean().sqrt())
    # The mean is at most as large, so that neither number is a small difference of large ones.
    return [*form, typical, 2 * typical + float(wide.mean())]


def _digest(data: Any) -> str:
    return blake2b(data, digest_size=8).hexdigest()
