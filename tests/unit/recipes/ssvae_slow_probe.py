"""The linear probe by its definition, for comparison: autograd and another solver."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def slow_fit(features: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """The weights [L + 1, C] by L-BFGS for ``features`` [n, L] that all vary."""
    scaled = (features - features.mean(0)) / features.std(0, correction=0)
    design = torch.cat([scaled, torch.ones(len(scaled), 1, dtype=torch.float64)], 1)
    weight = torch.zeros(design.shape[1], num_classes, dtype=torch.float64, requires_grad=True)
    solver = torch.optim.LBFGS(
        [weight],
        max_iter=3000,
        tolerance_grad=1e-11,
        tolerance_change=0,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        solver.zero_grad()
        loss = F.cross_entropy(design @ weight, labels) + weight.square().sum() / (2 * len(labels))
        loss.backward()
        return loss

    solver.step(closure)
    return weight.detach()
