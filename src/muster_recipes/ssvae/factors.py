"""Images with known factors: rotated, scaled and shifted by known values."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

#: The columns of every table of factors, in this order.
NAMES = ("rotation", "scale", "shift_right", "shift_down")
_NUM_VALUES = 5
_MAX_ROTATION_RAD = math.radians(25)
_MAX_SHIFT = 0.2  # in half widths of the frame
_LEAST_SCALE = 0.75  # of the largest scale
_INK = 0.05  # a pixel above this belongs to the digit


class Factors(NamedTuple):
    """``level`` int64 [n, 4]: which of the values each image has; ``value`` float32 [n, 4]: the
    rotation in radians (clockwise), the scale, and the shifts in half widths of the frame."""

    level: Tensor
    value: Tensor


def full_grid(images: Tensor) -> Factors:
    """All 5⁴ = 625 combinations once, in ranges in which every one of ``images`` stays inside.

    ``images`` [n, side, side]. Rotations lie in ±25°, shifts in ±0.2 half widths. The scale goes
    from 0.75 of the largest to the largest at which the ink still is inside the frame after any
    rotation and shift: about 0.6 for digits that fill the frame (8x8), 0.8 for those of MNIST.
    """
    largest = _largest_scale(images)
    values = torch.stack(
        [
            torch.linspace(-_MAX_ROTATION_RAD, _MAX_ROTATION_RAD, _NUM_VALUES),
            torch.linspace(_LEAST_SCALE * largest, largest, _NUM_VALUES),
            torch.linspace(-_MAX_SHIFT, _MAX_SHIFT, _NUM_VALUES),
            torch.linspace(-_MAX_SHIFT, _MAX_SHIFT, _NUM_VALUES),
        ]
    )
    level = torch.cartesian_prod(*[torch.arange(_NUM_VALUES)] * len(NAMES))
    return Factors(level, torch.stack([values[k][level[:, k]] for k in range(len(NAMES))], 1))


def transformed(images: Tensor, value: Tensor) -> Tensor:
    """``images`` [n, side, side] scaled about their middle, then rotated, then shifted.

    ``value`` [n, 4] as in :class:`Factors`. Bilinear; outside the frame is 0.
    """
    angle, scale, right, down = value.to(images).unbind(1)
    cos, sin = torch.cos(angle) / scale, torch.sin(angle) / scale
    # grid_sample asks where a pixel comes from: the inverse of the movement.
    inverse = torch.stack(
        [
            torch.stack([cos, sin, -cos * right - sin * down], 1),
            torch.stack([-sin, cos, sin * right - cos * down], 1),
        ],
        1,
    )
    shape = [len(images), 1, *images.shape[1:]]
    grid = torch.nn.functional.affine_grid(inverse, shape, align_corners=False)
    moved = torch.nn.functional.grid_sample(images[:, None], grid, align_corners=False)
    return moved[:, 0]


def moved_images(
    images: Tensor, num_repeats: int, stream: torch.Generator
) -> tuple[Tensor, Factors]:
    """The full grid ``num_repeats`` times, each combination with an image drawn at random.

    ``images`` [n, side, side] -> [625 · num_repeats, side, side]. The image is independent of the
    factors, and the factors of each other.
    """
    grid = full_grid(images)
    factors = Factors(grid.level.repeat(num_repeats, 1), grid.value.repeat(num_repeats, 1))
    chosen = torch.randint(len(images), (len(factors.level),), generator=stream)
    return transformed(images[chosen.to(images.device)], factors.value), factors


def _largest_scale(images: Tensor) -> float:
    """The largest scale, at most 1, with scale · (|x| cos + |y| sin) + shift within the frame."""
    side = images.shape[-1]
    inked = (images > _INK).any(0).nonzero().double()
    if not len(inked):
        return 1.0
    # Outer edge of the outermost pixel with ink, in half widths from the middle.
    extent = float(((inked - (side - 1) / 2).abs() + 0.5).max()) / (side / 2)
    reach = extent * (math.cos(_MAX_ROTATION_RAD) + math.sin(_MAX_ROTATION_RAD))
    return min(1.0, (1 - _MAX_SHIFT) / reach)
