"""The images of a data set as one tensor per split."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from muster_recipes.digits import images
from muster_recipes.digits.config import DigitsConfig
from muster_recipes.digits.files import VAL_SHARE
from muster_recipes.digits.images import Images
from muster_recipes.ssvae.dataset import EMBEDDED, canonical, hub_rows

#: The largest pixel value in the files.
_WHITE = {EMBEDDED: 16.0, "mnist": 255.0, "fashion-mnist": 255.0}


class Pool(NamedTuple):
    """``x`` float32 [n, D] in [0, 1]; ``labels`` int64 [n]; ``size``: height, width."""

    x: Tensor
    labels: Tensor
    size: tuple[int, int] | None = None

    def to(self, device: str | torch.device) -> Pool:
        """The same images on ``device``."""
        return Pool(self.x.to(device), self.labels.to(device), self.size)


def load(dataset: str, data_dir: Path | None = None, split_seed: int = 0) -> dict[str, Pool]:
    """The splits train, val and test of a set: disjoint, and the same for the same ``split_seed``.

    Without ``data_dir`` the embedded digits come from the package and the others from the Hugging
    Face hub (or its cache). UsageError for a damaged or missing file, SetupError when the hub
    cannot be read; both say what to do.
    """
    name = canonical(dataset)
    if name != EMBEDDED and data_dir is None:
        splits = _from_hub(name, split_seed)
    else:
        config = DigitsConfig(dataset=name, data_dir=data_dir, split_seed=split_seed)  # type: ignore[arg-type]
        splits = images.load(config)
    return {part: _flat(images_, _WHITE[name]) for part, images_ in splits.items()}


def _flat(some: Images, white: float) -> Pool:
    height, width = some.pixels.shape[-2:]
    return Pool(some.pixels.flatten(1).float() / white, some.labels, (height, width))


def _from_hub(name: str, split_seed: int) -> dict[str, Images]:
    both = hub_rows(name)
    rest, test = (_images(both[part].with_format("numpy")) for part in ("train", "test"))
    train, val = images.split(rest, VAL_SHARE, split_seed + 1)
    return {"train": train, "val": val, "test": test}


def _images(rows: object) -> Images:
    """All rows of a hub data set with the columns image and label."""
    table = rows[:]  # type: ignore[index]
    pixels = torch.as_tensor(table["image"], dtype=torch.uint8)
    return Images(pixels[:, None], torch.as_tensor(table["label"], dtype=torch.int64))
