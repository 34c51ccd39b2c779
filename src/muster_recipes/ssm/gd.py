"""Gradient descent on the diagonal A of many students at once.

All cells of a call share the number of lags and sequences and the settings; widths may differ
(narrower students are padded and masked). The gradient is analytic:
dL/da_j = (2/N) Σ_n (w_n·S) Σ_m w_nm m a_j^(m-1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.utils.rnn import pad_sequence

_BETA1, _BETA2, _EPS = 0.9, 0.999, 1e-8  # torch.optim.Adam's defaults


@dataclass(frozen=True, kw_only=True)
class GdSettings:
    """See ``SsmConfig`` for the meaning of each."""

    lr: float
    epochs: int
    init_scale: float
    optimizer: str
    scheduler: str
    init_type: str


@dataclass(frozen=True)
class GdCell:
    """One student: ``h`` [K], ``w`` [N, K], its width and the seed of its initial values."""

    h: tuple[float, ...]
    w: tuple[tuple[float, ...], ...]
    dim: int
    init_seed: int


def train(
    cells: Sequence[GdCell], settings: GdSettings, device: str = "cpu"
) -> list[tuple[float, float]]:
    """(L_train, L_gen) of each cell after the last step, in float64.

    A cell does not depend on its neighbours: its stream is its own, and operations are
    elementwise over cells, so a cell that diverges to NaN leaves the others alone.
    """
    h = torch.tensor([cell.h for cell in cells], dtype=torch.float64, device=device)
    w = torch.tensor([cell.w for cell in cells], dtype=torch.float64, device=device)
    a = pad_sequence([initial_values(cell, settings) for cell in cells], True).to(device)
    widths = torch.tensor([[cell.dim] for cell in cells], device=device)
    mask = torch.arange(a.shape[1], device=device) < widths
    powers = torch.arange(1, h.shape[1] + 1, dtype=torch.float64, device=device)
    coefficients = w * powers  # w_nm · m, [C, N, K]
    first, second = torch.zeros_like(a), torch.zeros_like(a)
    # Adam by hand: torch.optim brings torch._dynamo, 1.5 s, and takes 1.6 times as long for a step.
    for step in range(settings.epochs):
        gradient = _gradient(a, h, w, coefficients).mul_(mask)
        lr = learning_rate(settings, step)
        if settings.optimizer == "sgd":
            a.sub_(gradient, alpha=lr)
            continue
        first.mul_(_BETA1).add_(gradient, alpha=1 - _BETA1)
        second.mul_(_BETA2).addcmul_(gradient, gradient, value=1 - _BETA2)
        correction = math.sqrt(1 - _BETA2 ** (step + 1))
        denominator = second.sqrt().div_(correction).add_(_EPS)
        a.addcdiv_(first, denominator, value=-lr / (1 - _BETA1 ** (step + 1)))
    error = _error(a, h)
    train_loss = torch.einsum("cnk,ck->cn", w, error).square().mean(1)
    gen_loss = error.square().sum(1)
    return list(zip(train_loss.tolist(), gen_loss.tolist(), strict=True))


def initial_values(cell: GdCell, settings: GdSettings) -> torch.Tensor:
    """[d] float64 from the cell's own stream, on the CPU so that devices agree."""
    stream = torch.Generator().manual_seed(cell.init_seed & (2**63 - 1))
    normal = torch.randn(cell.dim, generator=stream, dtype=torch.float64)
    scaled = settings.init_scale * normal
    if settings.init_type == "near_one":
        return 1.0 + scaled
    if settings.init_type == "positive":
        return scaled.abs()
    if settings.init_type == "one_large":
        scaled[scaled.abs().argmax()] *= 5.0
    return scaled


def learning_rate(settings: GdSettings, step: int) -> float:
    """The rate of step 0, 1, …

    ``step`` divides by 10 after each third, ``exponential`` goes down to a hundredth, ``cosine``
    to zero (Loshchilov & Hutter 2017, eq. 5 without restarts).
    """
    share = step / settings.epochs
    match settings.scheduler:
        case "step":
            return float(settings.lr * 10.0 ** -math.floor(3 * share))
        case "exponential":
            return float(settings.lr * 0.01**share)
        case "cosine":
            return settings.lr * 0.5 * (1 + math.cos(math.pi * share))
    return settings.lr


def _error(a: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    """S_m = Σ_j a_j^m - h_m, [C, K]; padding is 0 and adds nothing."""
    power = a.clone()
    sums = [power.sum(1)]
    for _ in range(1, h.shape[1]):
        power.mul_(a)
        sums.append(power.sum(1))
    return torch.stack(sums, 1) - h


def _gradient(
    a: torch.Tensor, h: torch.Tensor, w: torch.Tensor, coefficients: torch.Tensor
) -> torch.Tensor:
    """dL_train/da [C, d], by Horner's rule over the lags."""
    residual = torch.einsum("cnk,ck->cn", w, _error(a, h))
    slopes = torch.einsum("cn,cnk->ck", residual, coefficients) * (2.0 / w.shape[1])
    gradient = slopes[:, -1:].expand_as(a).clone()
    for lag in range(h.shape[1] - 2, -1, -1):
        gradient.mul_(a).add_(slopes[:, lag : lag + 1])
    return gradient
