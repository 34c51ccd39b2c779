"""A curve of any length as few points that look the same at a given width."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Column = NDArray[Any]


class Drawn(NamedTuple):
    """Points to draw, x ascending; y is None where a value is not finite: a gap."""

    x: list[float]
    y: list[float | None]


def decimate(x: Column, y: Column, px: int) -> Drawn:
    """At most ``2 * px`` of these points: the first, the last, and of each of ``px - 1`` columns of
    pixels between them the lowest and the highest. ``px`` is 2 at least.

    Every point of the result is one of those given; a point without an x is left out. A column
    that holds no finite value at all keeps one point, so that a gap stays a gap.
    """
    known = np.isfinite(x)
    if not known.all():
        x, y = x[known], y[known]
    if len(x) > 1 and (np.diff(x) < 0).any():
        order = np.argsort(x, kind="stable")
        x, y = x[order], y[order]
    if len(x) > 2 * px:
        kept = _kept(x.astype(float), y.astype(float), px)
        x, y = x[kept], y[kept]
    return Drawn(x.tolist(), [v if math.isfinite(v) else None for v in y.tolist()])


def _kept(x: Column, y: Column, px: int) -> Column:
    """The positions that stay, ascending."""
    inner = np.arange(1, len(x) - 1)
    span = x[-1] - x[0]
    column = np.zeros(len(inner), np.int64)
    if span > 0 and math.isfinite(span):
        share = (x[inner] - x[0]) / span
        column = np.minimum((share * (px - 1)).astype(np.int64), px - 2)
    starts = np.flatnonzero(np.diff(column, prepend=-1))
    which = np.repeat(np.arange(len(starts)), np.diff(starts, append=len(inner)))
    is_known = np.isfinite(y[inner])
    lowest = _chosen(np.minimum, np.where(is_known, y[inner], np.inf), starts, which)
    highest = _chosen(np.maximum, np.where(is_known, y[inner], -np.inf), starts, which)
    return np.unique(np.concatenate([[0], inner[lowest], inner[highest], [len(x) - 1]]))


def _chosen(choose: np.ufunc, values: Column, starts: Column, which: Column) -> Column:
    """For every column of pixels the position of the first of its values that is chosen."""
    best = choose.reduceat(values, starts)
    places = np.where(values == best[which], np.arange(len(values)), len(values))
    return np.minimum.reduceat(places, starts)


def between(x: Column, low: float | None, high: float | None) -> slice:
    """Where ``x``, which ascends, lies from ``low`` to ``high``, with a neighbour on each side, so
    that lines reach the edges."""
    first = 0 if low is None else int(np.searchsorted(x, low, "left")) - 1
    last = len(x) if high is None else int(np.searchsorted(x, high, "right")) + 1
    return slice(max(0, first), last)
