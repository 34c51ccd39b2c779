"""A linear probe: multinomial logistic regression, fitted to convergence, for many runs at once."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

#: A dimension that varies less than this holds rounding errors and no information.
_DEAD_STD = 1e-6
_TOLERANCE = 1e-8  # of the largest entry of the gradient of the mean loss
_MAX_STEPS = 100
_MAX_HALVINGS = 40


class Probe(NamedTuple):
    """``weight`` float64 [R, L + 1, C], the last row of which is the intercept; ``mean`` and
    ``std`` [R, 1, L] of the features that it was fitted on; ``converged`` bool [R]."""

    weight: Tensor
    mean: Tensor
    std: Tensor
    converged: Tensor

    def predict(self, features: Tensor) -> Tensor:
        """The likeliest class, int64 [R, n], of ``features`` [R, n, L]."""
        return (_design(features.double(), self.mean, self.std) @ self.weight).argmax(-1)


def fit(features: Tensor, labels: Tensor, num_classes: int = 10) -> Probe:
    """Fit ``features`` [R, n, L] to ``labels`` int64 [n] or [R, n], by Newton's method in float64.

    Features are standardised, so that the probe does not depend on the unit of a dimension;
    one that does not vary is left out. Minimised is the mean cross-entropy plus |weight|²/2n (the
    default strength of scikit-learn), intercept included: strictly convex, also when a class is
    absent, so there is one optimum and no random start. A run whose features are not finite, or
    for which the gradient does not vanish, is not ``converged``.
    """
    features = features.double()
    finite = features.isfinite().flatten(1).all(dim=1)
    features = torch.where(finite[:, None, None], features, 0.0)
    mean, std = features.mean(1, keepdim=True), features.std(1, keepdim=True, correction=0)
    design = _design(features, mean, std)
    target = torch.nn.functional.one_hot(labels, num_classes).double().expand(len(design), -1, -1)
    penalty = 1.0 / design.shape[1]
    weight = design.new_zeros(len(design), design.shape[2], num_classes)
    for _ in range(_MAX_STEPS):
        probability = (design @ weight).softmax(-1)
        gradient = _gradient(design, target, weight, probability, penalty)
        if bool((gradient.abs().amax((1, 2)) <= _TOLERANCE).all()):
            break
        step = _newton_step(design, probability, gradient, penalty)
        weight = _shortened(design, target, weight, gradient, step, penalty)
    gradient = _gradient(design, target, weight, (design @ weight).softmax(-1), penalty)
    converged = finite & (gradient.abs().amax((1, 2)) <= _TOLERANCE)
    return Probe(weight, mean, std, converged)


def _design(features: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """The standardised features and a column of ones, [R, n, L + 1]."""
    scaled = torch.where(std > _DEAD_STD, (features - mean) / std.clamp_min(_DEAD_STD), 0.0)
    return torch.cat([scaled, torch.ones_like(scaled[..., :1])], dim=-1)


def _loss(design: Tensor, target: Tensor, weight: Tensor, penalty: float) -> Tensor:
    log_probability = (design @ weight).log_softmax(-1)
    cross_entropy = -(log_probability * target).sum(-1).mean(-1)
    return cross_entropy + 0.5 * penalty * weight.square().sum((1, 2))


def _gradient(
    design: Tensor, target: Tensor, weight: Tensor, probability: Tensor, penalty: float
) -> Tensor:
    return design.mT @ (probability - target) / design.shape[1] + penalty * weight


def _newton_step(design: Tensor, probability: Tensor, gradient: Tensor, penalty: float) -> Tensor:
    """-H⁻¹ gradient, [R, L + 1, C]; H is that of Böhning (1992) plus the penalty."""
    num_runs, count, width = design.shape
    num_classes = probability.shape[2]
    size = num_classes * width
    # Rows of p_c · x, classes outermost: both parts of H are products of matrices.
    spread = (probability[..., None] * design[:, :, None, :]).view(num_runs, count, size)
    hessian = -(spread.mT @ spread)
    same_class = (spread.mT @ design).view(num_runs, num_classes, width, width)
    blocks = hessian.view(num_runs, num_classes, width, num_classes, width)
    blocks.diagonal(dim1=1, dim2=3).add_(same_class.permute(0, 2, 3, 1))
    hessian = hessian / count + penalty * torch.eye(size, dtype=design.dtype, device=design.device)
    factor, _ = torch.linalg.cholesky_ex(hessian)
    flat = gradient.mT.reshape(num_runs, size, 1)
    return -torch.cholesky_solve(flat, factor).view(num_runs, num_classes, width).mT


def _shortened(
    design: Tensor, target: Tensor, weight: Tensor, gradient: Tensor, step: Tensor, penalty: float
) -> Tensor:
    """``weight`` plus the step, halved until the loss of a run falls enough (Armijo's rule)."""
    before = _loss(design, target, weight, penalty)
    slope = (gradient * step).sum((1, 2))
    length = torch.ones_like(before)
    for _ in range(_MAX_HALVINGS):
        after = _loss(design, target, weight + length[:, None, None] * step, penalty)
        # The rounding error of a loss near its minimum must not stop the last steps.
        short = after > before + 1e-4 * length * slope + 1e-14
        if not bool(short.any()):
            break
        length = torch.where(short, length / 2, length)
    return weight + length[:, None, None] * step
