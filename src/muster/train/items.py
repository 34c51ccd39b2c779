"""What items of a data set are like: random or not, the same again, and the same on all ranks."""

from __future__ import annotations

import math
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from muster.base.errors import MusterError
from muster.rank.process_group import Council
from muster.rank.seeding import Untouched, seed_sample

#: Whole numbers in tensors up to this size are labels or tokens, and not an image.
_FEW = 16


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
    """Whether two items hold the same numbers; items without numbers count as the same."""
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(_is_same(first[k], second[k]) for k in first)
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(map(_is_same, first, second))
    if isinstance(first, bool | int | float | str | bytes):
        return bool(first == second or first != first)
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        both_nan = first.shape == second.shape and torch.equal(first.isnan(), second.isnan())
        return both_nan and torch.equal(first.nan_to_num(), second.nan_to_num())
    if hasattr(first, "tobytes") and hasattr(second, "tobytes"):  # arrays and images
        return bool(first.tobytes() == second.tobytes())
    return True


class Outline(NamedTuple):
    """What an item is: a digest of what must be exact, and sizes of what need not: another
    machine's decoder may give an image's other last digits.
    """

    exact: str
    sizes: list[float]

    def is_like(self, other: Outline) -> bool:
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
    found = council.gather(own if repeats else None)
    if None in found:  # they are others at each fetch; a training says so
        return
    for place, *each in zip(places, *found, strict=True):
        odd = [rank for rank, item in enumerate(each) if not item.is_like(each[0])]
        if odd:
            raise MusterError(
                f"The ranks do not have the same {split} data: item {place} of rank {odd[0]} is "
                "another than rank 0's, so that some samples would be taken twice, or under "
                "another label, and others never.",
                hint="give all ranks all of the data in one order. Files are listed in no certain "
                "order, and a set of texts has another in every process: sort both.",
            )


def outline(item: Any) -> Outline:
    exact, sizes = blake2b(digest_size=8), list[float]()
    for part in _parts(item):
        if isinstance(part, float):
            sizes.append(part)
        exact.update(f"{'' if isinstance(part, float) else repr(part)}\n".encode())
    return Outline(exact.hexdigest(), sizes)


def _parts(item: Any) -> list[Any]:
    if isinstance(item, dict):
        pairs = sorted(item.items(), key=lambda pair: str(pair[0]))  # as they came from a set, say
        return [part for key, value in pairs for part in (str(key), *_parts(value))]
    if isinstance(item, list | tuple):
        return [len(item), *(part for value in item for part in _parts(value))]
    if isinstance(item, str) and item.startswith(
        "/"
    ):  # a file, in a folder of its own on each host
        return [item.rpartition("/")[2]]
    if isinstance(item, bool | int | float | str | bytes):
        return [item]
    if isinstance(item, Tensor):
        return _parts_of_tensor(item.detach())
    kind = getattr(getattr(item, "dtype", None), "kind", None)
    if kind is None and hasattr(item, "tobytes"):  # an image
        data = torch.frombuffer(bytearray(item.tobytes() or b"0"), dtype=torch.uint8)
        return [type(item).__name__, *_parts_of_tensor(data)]
    array = item.__array__() if kind is not None and hasattr(item, "__array__") else None
    if array is not None and array.dtype.kind in tuple("biuf"):
        wide = torch.as_tensor(array.astype("float64", order="C"))
        is_few = array.dtype.kind != "f" and array.size <= _FEW
        return [str(array.dtype), *([array.tolist()] if is_few else _parts_of_tensor(wide))]
    return [type(item).__name__]


def _parts_of_tensor(tensor: Tensor) -> list[Any]:
    form = [str(tensor.dtype), tuple(tensor.shape)]
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return form
    if tensor.numel() <= _FEW and not (tensor.is_floating_point() or tensor.is_complex()):
        return [*form, tensor.tolist()]
    wide = (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).double()
    typical = float(wide.square().mean().sqrt())
    # The mean is at most as large, so that neither number is a small difference of large ones.
    return [*form, typical, 2 * typical + float(wide.mean())]
