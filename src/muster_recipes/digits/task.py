"""The training task ``digits``, and its networks: images [n, channels, height, width] to logits."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from muster import Task
from muster_recipes.digits.config import RECIPE, DigitsConfig
from muster_recipes.digits.files import NUM_CLASSES
from muster_recipes.digits.images import Images, ImageSet, load, moments

_GROUPS = 8
_SMALLEST = 4  # no stage works on fewer pixels than this on a side


def cnn(channels: int, height: int, width: int, num_classes: int, base: int) -> nn.Module:
    """Stages of two 3x3 convolutions and a pooling, doubling the channels, at most three stages.

    GroupNorm, so that a result does not depend on how a batch is cut into ranks.
    """
    layers: list[nn.Module] = []
    filters = base
    for _ in range(3):
        for _ in range(2):
            layers += [
                nn.Conv2d(channels, filters, 3, padding=1, bias=False),
                nn.GroupNorm(_GROUPS, filters),
                nn.ReLU(),
            ]
            channels = filters
        layers.append(nn.MaxPool2d(2))
        height, width, filters = height // 2, width // 2, 2 * filters
        if min(height, width) < _SMALLEST:
            break
    layers += [nn.Flatten(), nn.Dropout(0.2), nn.Linear(channels * height * width, num_classes)]
    return nn.Sequential(*layers)


def mlp(channels: int, height: int, width: int, num_classes: int, base: int) -> nn.Module:
    """Two hidden layers."""
    units = 8 * base
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(channels * height * width, units),
        nn.ReLU(),
        nn.Linear(units, units),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(units, num_classes),
    )


_SHIFT = {"digits": 1, "mnist": 2, "fashion-mnist": 2, "cifar10": 4}


class DigitsTask(Task):
    """Classify images into ten classes. Metrics: ``accuracy``, ``loss``, accuracy per class."""

    defaults: ClassVar[Mapping[str, Any]] = RECIPE.defaults
    monitor: ClassVar[str] = "accuracy"
    better: ClassVar[Literal["lower", "higher"]] = "higher"

    def __init__(self, config: DigitsConfig) -> None:
        self.config = config

    @cached_property
    def _splits(self) -> dict[str, Images]:
        return load(self.config)

    @cached_property
    def _moments(self) -> tuple[Tensor, Tensor]:
        return moments(self._splits["train"])

    def model(self) -> nn.Module:
        channels, height, width = self._splits["train"].pixels.shape[1:]
        make = cnn if self.config.model == "cnn" else mlp
        return make(channels, height, width, NUM_CLASSES, self.config.width)

    def dataset(self, split: Literal["train", "val", "test"]) -> ImageSet:
        mean, std = self._moments
        is_varied = self.config.augment and split == "train"
        return ImageSet(
            self._splits[split],
            mean,
            std,
            shift=_SHIFT[self.config.dataset] if is_varied else 0,
            mirror=is_varied and self.config.dataset == "cifar10",
        )

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        return F.cross_entropy(model(images).float(), labels, reduction="none")

    def score(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        images, labels = batch
        logits = model(images).float()
        return {
            "loss": F.cross_entropy(logits, labels, reduction="none"),
            "label": labels,
            "guess": logits.argmax(1),
        }

    def summarise(self, columns: dict[str, Tensor]) -> dict[str, Any]:
        label, is_right = columns["label"], columns["guess"] == columns["label"]
        total = torch.bincount(label, minlength=NUM_CLASSES)
        right = torch.bincount(label[is_right], minlength=NUM_CLASSES)
        return {
            "loss": float(columns["loss"].double().mean()),
            "accuracy": float(is_right.double().mean()),
            "class_accuracy": [
                r / t if t else None for r, t in zip(right.tolist(), total.tolist(), strict=True)
            ],
            "data": self.config.dataset,
        }
