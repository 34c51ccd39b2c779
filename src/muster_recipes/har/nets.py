"""The networks: signals [n, channels, 128] to logits [n, classes].

A 1-D convolutional residual network, and a head on a frozen ViT that looks at line charts.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from muster import MissingPackageError, UsageError

_GROUPS = 8


class ConvNet(nn.Module):
    """A strided first layer, three residual stages that halve time and double the channels, and
    the mean over time. GroupNorm, so that a result does not depend on how a batch is cut.
    """

    def __init__(self, channels: int, num_classes: int, width: int) -> None:
        super().__init__()
        self.first = nn.Conv1d(channels, width, 7, stride=2, padding=3, bias=False)
        self.stages = nn.Sequential(
            _Residual(width, width, 1),
            _Residual(width, 2 * width, 2),
            _Residual(2 * width, 4 * width, 2),
        )
        self.norm = nn.GroupNorm(_GROUPS, 4 * width)
        self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(4 * width, num_classes))

    def forward(self, signals: Tensor) -> Tensor:
        hidden = F.relu(self.norm(self.stages(self.first(signals))))
        logits: Tensor = self.head(hidden.mean(-1))
        return logits


class _Residual(nn.Module):
    """A norm before each convolution; the skip connection is a 1x1 convolution if shapes differ."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(_GROUPS, channels)
        self.conv1 = nn.Conv1d(channels, out, 5, stride=stride, padding=2, bias=False)
        self.norm2 = nn.GroupNorm(_GROUPS, out)
        self.conv2 = nn.Conv1d(out, out, 5, padding=2, bias=False)
        self.around: nn.Module = (
            nn.Identity()
            if stride == 1 and channels == out
            else nn.Conv1d(channels, out, 1, stride=stride, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.conv1(F.relu(self.norm1(x)))
        hidden = self.conv2(F.relu(self.norm2(hidden)))
        out: Tensor = self.around(x) + hidden
        return out


_RANGE = 4.0  # standard deviations shown above and below the middle
_HALF_LINE = 1.0  # half the thickness of the line, in pixels


class VitHead(nn.Module):
    """Signals [n, channels, 128] to logits [n, classes].

    Each channel is a chart of its own; the ViT's class tokens of all channels side by side are the
    input of the head, which is all that is trained.
    """

    def __init__(self, path: Path, channels: int, num_classes: int) -> None:
        super().__init__()
        self.encoder = _load(path)
        self.encoder.requires_grad_(False)
        self._size = int(self.encoder.config.image_size)
        self._mean, self._std = _normalisation(path)
        num_features = channels * int(self.encoder.config.hidden_size)
        self.head = nn.Sequential(nn.LayerNorm(num_features), nn.Linear(num_features, num_classes))
        self.train()

    def train(self, mode: bool = True) -> VitHead:
        """Switch the mode of the head; the encoder stays in evaluation mode, without dropout."""
        super().train(mode)
        self.encoder.eval()
        return self

    def forward(self, signals: Tensor) -> Tensor:
        n, channels, _ = signals.shape
        with torch.no_grad():
            ink = line_charts(signals.flatten(0, 1), self._size)
            paper = (1 - ink)[:, None].expand(-1, 3, -1, -1)
            mean, std = (
                torch.tensor(values, device=signals.device)[:, None, None]
                for values in (self._mean, self._std)
            )
            seen = self.encoder(pixel_values=(paper - mean) / std).last_hidden_state[:, 0]
        logits: Tensor = self.head(seen.reshape(n, channels * seen.shape[-1]))
        return logits


def line_charts(signals: Tensor, size: int = 224) -> Tensor:
    """Standardised signals [..., steps] to images [..., size, size], 1 on the line and 0 off it.

    Time goes to the right over the full width; the top row is +4, the bottom row -4, and what is
    beyond is drawn at the edge. Each column of pixels is filled over the range the curve takes in
    it, softened over one pixel.
    """
    flat = signals.reshape(-1, 1, signals.shape[-1]).float()
    # The curve at the edges of the columns: size + 1 points.
    curve = F.interpolate(flat, size + 1, mode="linear", align_corners=True)[:, 0]
    rows = (_RANGE - curve.clamp(-_RANGE, _RANGE)) / (2 * _RANGE) * (size - 1)
    top = torch.minimum(rows[:, :-1], rows[:, 1:])[:, None]  # [m, 1, column]
    bottom = torch.maximum(rows[:, :-1], rows[:, 1:])[:, None]
    row = torch.arange(size, device=signals.device, dtype=torch.float32)[:, None]
    distance = torch.maximum(top - row, row - bottom).clamp_min(0)
    image = (_HALF_LINE + 0.5 - distance).clamp(0, 1)
    return image.reshape(*signals.shape[:-1], size, size)


def _load(path: Path) -> Any:
    try:
        transformers = importlib.import_module("transformers")
    except ImportError:
        instead = "use --encoder conv"
        raise MissingPackageError(
            "--encoder vit", "transformers", "transformers", instead=instead
        ) from None
    try:
        return transformers.ViTModel.from_pretrained(
            str(path), add_pooling_layer=False, local_files_only=True
        )
    except (OSError, ValueError) as error:
        raise UsageError(f"--encoder-path {path} cannot be loaded as a ViT: {error}") from None


def _normalisation(path: Path) -> tuple[list[float], list[float]]:
    """Means and deviations of the three colours the ViT was trained with; 0.5 if not said."""
    file = path / "preprocessor_config.json"
    said = json.loads(file.read_text()) if file.exists() else {}
    return said.get("image_mean", [0.5] * 3), said.get("image_std", [0.5] * 3)
