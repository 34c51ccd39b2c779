"""Images and labels in memory, and their splits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import Dataset

from muster_recipes.digits.config import DigitsConfig
from muster_recipes.digits.files import (
    NUM_CLASSES,
    TEST_SHARE,
    VAL_SHARE,
    Arrays,
    read_cifar10,
    read_digits,
    read_mnist,
)


@dataclass(frozen=True)
class Images:
    """``pixels``: uint8 [n, channels, height, width]. ``labels``: int64 [n]."""

    pixels: Tensor
    labels: Tensor

    def of(self, indices: Tensor) -> Images:
        """The images at these indices."""
        return Images(self.pixels[indices], self.labels[indices])


def load(config: DigitsConfig) -> dict[str, Images]:
    """The splits train, val and test; every image is in one of them."""
    if config.dataset == "digits":
        rest, test = split(embedded_digits(), TEST_SHARE, config.split_seed)
    else:
        assert config.data_dir is not None
        read = read_cifar10 if config.dataset == "cifar10" else read_mnist
        rest, test = map(_images, read(config.data_dir))
    train, val = split(rest, VAL_SHARE, config.split_seed + 1)
    return {"train": train, "val": val, "test": test}


def embedded_digits() -> Images:
    """The digits of `read_digits`."""
    return _images(read_digits())


def _images(arrays: Arrays) -> Images:
    pixels, labels = arrays
    return Images(torch.from_numpy(pixels), torch.from_numpy(labels.astype(np.int64)))


def split(images: Images, share: float, seed: int) -> tuple[Images, Images]:
    """Divide images into the rest and about ``share`` of each class; both get one at least.

    The order of the indices is kept, so that a split is a set and not an order.
    """
    stream = torch.Generator().manual_seed(seed)
    chosen = torch.zeros(len(images.labels), dtype=torch.bool)
    for label in range(NUM_CLASSES):
        members = (images.labels == label).nonzero()[:, 0]
        if not len(members):
            continue
        order = torch.randperm(len(members), generator=stream)
        chosen[members[order[: max(1, round(share * len(members)))]]] = True
    return images.of((~chosen).nonzero()[:, 0]), images.of(chosen.nonzero()[:, 0])


class ImageSet(Dataset[tuple[Tensor, Tensor]]):
    """Items: a float image with zero mean and unit variance over the training set, and a label.

    With ``shift`` an item is moved by up to so many pixels in each direction, at random; with
    ``mirror`` half of them are mirrored.
    """

    def __init__(
        self, images: Images, mean: Tensor, std: Tensor, *, shift: int = 0, mirror: bool = False
    ) -> None:
        self._pixels, self._labels = images.pixels, images.labels
        self._mean, self._std = mean, std
        self._shift, self._mirror = shift, mirror

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = self._pixels[index]
        if self._shift:
            down, right = torch.randint(-self._shift, self._shift + 1, (2,)).tolist()
            image = shifted(image, down, right)
        if self._mirror and bool(torch.rand(()) < 0.5):
            image = image.flip(-1)
        return (image.float() - self._mean) / self._std, self._labels[index]


def moments(images: Images) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each channel, [channels, 1, 1]."""
    # From counts of the 256 values: a float64 copy of all of CIFAR-10 would be 1.2 GB.
    channels = images.pixels.unbind(1)
    counts = torch.stack([c.flatten().int().bincount(minlength=256) for c in channels]).double()
    values = torch.arange(256, dtype=torch.float64)
    total = counts.sum(1, keepdim=True)  # [channels, 1]
    mean = (counts * values).sum(1, keepdim=True) / total
    std = ((counts * (values - mean) ** 2).sum(1, keepdim=True) / total).sqrt()
    return mean.float()[..., None], std.float().clamp_min(1e-6)[..., None]


def shifted(image: Tensor, down: int, right: int) -> Tensor:
    """``image`` [c, h, w] moved by at most its size, with zeros where nothing was."""
    return pad(image, (right, -right, down, -down))
