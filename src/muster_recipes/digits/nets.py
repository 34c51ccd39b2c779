"""The networks: images [n, channels, height, width] to logits [n, classes]."""

from __future__ import annotations

from torch import nn

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
