"""Operations against the textbook's count, and MFU by its definition."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from muster.rank.meter import Flops, count_flops, kept_bytes


def test_a_products_operations_are_two_per_multiply_and_add() -> None:
    """Forward 2*n*i*o; backward twice that, without the first layer's gradient of its input."""
    n, sizes = 5, (16, 32, 10)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 10))
    x = torch.randn(n, 16)
    forward = sum(2 * n * i * o for i, o in pairwise(sizes))
    backward = 2 * forward - 2 * n * 16 * 32
    assert count_flops(model, lambda: model(x).sum().backward()) == forward + backward


def test_recurrent_layers_are_not_guessed_at() -> None:
    model = nn.LSTM(4, 4)
    assert count_flops(model, lambda: model(torch.randn(3, 1, 4))) is None


def test_utilisation_is_of_all_cards() -> None:
    flops = Flops(per_sample=6e9, peak=100e12)
    assert flops.utilisation(10_000, 1) == pytest.approx(0.6)
    assert flops.utilisation(10_000, 4) == pytest.approx(0.15)
    assert flops.utilisation(None, 1) is None


@pytest.mark.parametrize("n", [1, 7])
def test_what_is_kept_is_each_layers_input_once(n: int) -> None:
    """The first layer's input, and ReLU's output, which is the second layer's input as well."""
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 10))
    with kept_bytes(model) as sizes:
        out = model(torch.randn(n, 16))
    assert out.requires_grad
    assert sum(sizes) == n * (16 + 32) * 4
