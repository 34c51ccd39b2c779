"""The next token of every sequence of a batch, drawn from noise that belongs to the sequence.

One uniform number per token, a function of (seed, position) alone: the batch, the device and the
order of requests have no part in it. The token is where the cumulated probabilities, in the order
of the vocabulary, first exceed it; rounding of the logits therefore changes a token only where the
number is that close to a border.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def uniform(seed: int, position: int) -> float:
    """From 0 to below 1, with 53 random bits: SplitMix64 of the seed, then of the position."""
    return (_mixed(_mixed(seed) + _GOLDEN * (position + 1)) >> 11) * 2.0**-53


def _mixed(value: int) -> int:
    """The output function of SplitMix64 (Steele, Lea, Flood 2014)."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def draw(
    logits: Tensor, temperatures: Sequence[float], top_ps: Sequence[float], noise: Sequence[float]
) -> Tensor:
    """Tokens [n] for logits [n, vocabulary]; temperature 0 takes the most probable token."""
    tokens = logits.argmax(-1)
    rows = [row for row, temperature in enumerate(temperatures) if temperature > 0]
    if not rows:
        return tokens
    index = torch.tensor(rows, device=logits.device)
    drawn = _drawn(
        logits[index].double() / _column([temperatures[row] for row in rows], logits.device),
        _column([top_ps[row] for row in rows], logits.device),
        _column([noise[row] for row in rows], logits.device),
    )
    return tokens.index_copy(0, index, drawn)


def _drawn(logits: Tensor, top_p: Tensor, noise: Tensor) -> Tensor:
    probabilities = logits.softmax(-1)
    if bool((top_p < 1).any()):
        probabilities = probabilities.where(probabilities >= _least(probabilities, top_p), 0.0)
    cumulated = probabilities.cumsum(-1)
    index = (cumulated <= noise * cumulated[:, -1:]).sum(-1)
    # Rounding may put the border above the sum; the most probable token is as good an end as any.
    return index.where(index < logits.shape[-1], probabilities.argmax(-1))


def _least(probabilities: Tensor, top_p: Tensor) -> Tensor:
    """The smallest probability [n, 1] among the fewest tokens that hold ``top_p`` together."""
    falling = probabilities.sort(-1, descending=True).values
    before = falling.cumsum(-1) - falling
    count = (before < top_p).sum(-1, keepdim=True).clamp(min=1)
    return falling.gather(-1, count - 1)


def _column(values: Sequence[float], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=device)[:, None]
