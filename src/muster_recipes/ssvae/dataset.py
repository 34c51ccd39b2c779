"""The names of the data sets, and whether one can be read or fetched here. No torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from muster import SetupError, UsageError
from muster.generation import use_cache_if_unreachable
from muster_recipes.digits.files import (
    NUM_CLASSES,
    TEST_SHARE,
    VAL_SHARE,
    read_digits,
    read_mnist,
)

EMBEDDED = "digits"
#: Where the Hugging Face hub keeps a set.
HUB_NAMES = {"mnist": "ylecun/mnist", "fashion-mnist": "zalando-datasets/fashion_mnist"}
NAMES = (EMBEDDED, *HUB_NAMES)


class Source(NamedTuple):
    """How many training images can be labelled with equal numbers per class; pixels of an image."""

    most_labels: int
    height: int
    width: int


def canonical(name: str) -> str:
    """The one spelling of a data set's name; case, ``-`` and ``_`` do not count.

    UsageError for a name that is not known.

    >>> canonical("MNIST"), canonical("FashionMNIST"), canonical("fashion_mnist")
    ('mnist', 'fashion-mnist', 'fashion-mnist')
    """
    plain = name.lower().replace("-", "").replace("_", "")
    for known in NAMES:
        if known.replace("-", "") == plain:
            return known
    raise UsageError(
        f"--dataset {name} is not known.", hint=f"write one of {', '.join(NAMES)}, in any case."
    )


def check_source(dataset: str, data_dir: Path | None) -> Source | None:
    """Refuse a data set that cannot be read or fetched here, before anything starts.

    Files under ``data_dir`` are read from end to end, so that a damaged one is found now and not in
    every task. None for a set that is still to be fetched. UsageError for a mistake in the files,
    SetupError where the hub's package is missing.
    """
    if dataset == EMBEDDED:
        if data_dir is not None:
            raise UsageError(
                f"--data-dir {data_dir} has no effect: --dataset digits comes with the package.",
                hint="drop it, or say which set it holds with --dataset mnist or fashion-mnist.",
            )
        images, labels = read_digits()
        return Source(_most_labels(labels, (TEST_SHARE, VAL_SHARE)), *images.shape[-2:])
    if data_dir is not None:
        if not any(data_dir.glob("*-ubyte*")):
            raise UsageError(
                f"--data-dir {data_dir} does not exist or holds no IDX file.",
                hint=both_ways(dataset),
            )
        (images, labels), _ = read_mnist(data_dir)
        most = _most_labels(labels, (VAL_SHARE,), f"--data-dir {data_dir}")
        return Source(most, *images.shape[-2:])
    if importlib.util.find_spec("datasets") is None:
        raise SetupError(
            f"--dataset {dataset} is neither on this machine nor can it be fetched: --data-dir is "
            "not given, and the package datasets is not installed.",
            hint=both_ways(dataset),
        )
    return None


def check_labels(num_labels: int, source: Source | None, dataset: str) -> None:
    """UsageError for more labels than the training images allow, as far as that is known."""
    if source is not None and num_labels > source.most_labels:
        raise UsageError(
            f"--n-labels {num_labels}: the training images of {dataset} allow "
            f"{source.most_labels} labels with equal numbers per class.",
            hint=f"write {source.most_labels} or less.",
        )


def refuse_missing(counts: Sequence[int], where: str) -> None:
    """UsageError that names the classes of which there is no training image."""
    if missing := [str(label) for label, count in enumerate(counts) if not count]:
        raise UsageError(
            f"{where}: no training image of class {', '.join(missing)} is left beside the "
            "validation and test images, so labels cannot be chosen with equal numbers per class.",
            hint="give a data set that has every class.",
        )


def _most_labels(labels: NDArray[Any], held_out: Sequence[float], where: str = EMBEDDED) -> int:
    """Ten times what the rarest class has left after splits of these shares, class by class."""
    counts = np.bincount(labels, minlength=NUM_CLASSES).tolist()
    for share in held_out:
        counts = [count - max(1, round(share * count)) if count else 0 for count in counts]
    refuse_missing(counts, where)
    return NUM_CLASSES * int(min(counts))


def fetch(dataset: str, data_dir: Path | None) -> list[str]:
    """Bring a set from the hub into its cache and say so; SetupError where that fails."""
    if dataset == EMBEDDED or data_dir is not None:
        return []
    hub_rows(dataset)
    return [f"{dataset}: {HUB_NAMES[dataset]} of the Hugging Face hub, in its cache."]


def hub_rows(dataset: str) -> Any:
    """Both parts of a set on the hub, from its cache if they are there."""
    import datasets  # type: ignore[import-untyped]

    use_cache_if_unreachable()
    try:
        return datasets.load_dataset(HUB_NAMES[dataset])
    except (OSError, ValueError, RuntimeError) as error:
        raise SetupError(
            f"Cannot fetch the data set {HUB_NAMES[dataset]}: {str(error).partition(chr(10))[0]}",
            hint=both_ways(dataset),
        ) from error


def both_ways(dataset: str) -> str:
    """How a user gets a data set."""
    return (
        "either --data-dir FOLDER with the four published IDX files (plain or .gz), or "
        "pip install 'muster-gpu[datasets]' and a network, which fetches "
        f"{HUB_NAMES[dataset]} from the Hugging Face hub."
    )
