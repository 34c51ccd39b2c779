"""Images and labels in memory, and their splits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import Dataset

from muster_recipes.digits.config import DigitsConfig
from muster_recipes.digits.files import read_cifar10, read_mnist

NUM_CLASSES = 10
_VAL_SHARE = 0.1
_TEST_SHARE = 0.2  # of the embedded digits, which have no test set of their own


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
        rest, test = split(embedded_digits(), _TEST_SHARE, config.split_seed)
    else:
        assert config.data_dir is not None
        read = read_cifar10 if config.dataset == "cifar10" else read_mnist
        rest, test = (
            Images(torch.from_numpy(pixels), torch.from_numpy(labels.astype(np.int64)))
            for pixels, labels in read(config.data_dir)
        )
    train, val = split(rest, _VAL_SHARE, config.split_seed + 1)
    return {"train": train, "val": val, "test": test}


def embedded_digits() -> Images:
    """The 1,797 8x8 digits of scikit-learn's ``load_digits``, with values 0 to 16.

    They are the test set of "Optical Recognition of Handwritten Digits" by E. Alpaydin and
    C. Kaynak (1998), UCI Machine Learning Repository, doi 10.24432/C50P49, licence CC BY 4.0;
    taken from scikit-learn (BSD 3-Clause) by scripts/make_digits.py, which also compares.
    """
    with np.load(Path(__file__).with_name("digits.npz"), allow_pickle=False) as file:
        pixels, labels = file["images"], file["labels"]
    return Images(torch.from_numpy(pixels)[:, None], torch.from_numpy(labels.astype(np.int64)))


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
    shape = (images.pixels.shape[1], 1, 1)
    # Channel by channel: a float64 copy of all of CIFAR-10 would be 1.2 GB.
    means, stds = [], []
    for channel in images.pixels.unbind(1):
        counts = torch.bincount(channel.reshape(-1).int(), minlength=256).double()
        values = torch.arange(256, dtype=torch.float64)
        mean = (counts * values).sum() / counts.sum()
        means.append(mean)
        stds.append(((counts * (values - mean) ** 2).sum() / counts.sum()).sqrt())
    return (
        torch.stack(means).float().view(shape),
        torch.stack(stds).float().clamp_min(1e-6).view(shape),
    )


def shifted(image: Tensor, down: int, right: int) -> Tensor:
    """``image`` [c, h, w] moved by at most its size, with zeros where nothing was."""
    return pad(image, (right, -right, down, -down))
