"""Signals as line charts, with tensor operations only."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

_RANGE = 4.0  # standard deviations shown above and below the middle
_HALF_LINE = 1.0  # half the thickness of the line, in pixels


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
