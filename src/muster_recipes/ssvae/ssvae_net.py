"""One model as a module, over the functions that train many."""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch
from torch import Tensor, nn

from muster import UsageError
from muster_recipes.ssvae.hyper import Hyper
from muster_recipes.ssvae.noise import Noise
from muster_recipes.ssvae.objective import Terms, objective
from muster_recipes.ssvae.parameters import init_parameters


class SsvaeNet(nn.Module):
    """The model with its objective in ``forward``, where wrappers for several devices see it.

    ``alpha``: weight of log q(y|x) of a label. The initial weights follow from ``seed``.
    """

    def __init__(self, hyper: Hyper, alpha: float, seed: int) -> None:
        super().__init__()
        self.hyper = hyper
        self.alpha = alpha
        # Without the run dimension: FSDP cuts parameters along their first one.
        self.weights = nn.ParameterDict(
            {name: value[0] for name, value in init_parameters(hyper, [seed]).items()}
        )

    def forward(
        self,
        x: Tensor,
        labels: Tensor,
        is_labelled: Tensor,
        eps: Tensor,
        gumbel: Tensor | None = None,
    ) -> Terms:
        """The terms [B] (log_q [B, C]) of pixels ``x`` [B, D] with ``labels`` where known, [B].

        Noise ``eps`` [B, S, L] and ``gumbel`` [B, S, C]; without the latter the classes of an
        image that has no label are summed over, whatever the training does.
        """
        if torch.is_autocast_enabled(x.device.type):
            raise UsageError(
                "ssvae sums over pixels and samples, for which 16 bits are too few.",
                hint="use --precision fp32 or tf32.",
            )
        kind: Literal["exact", "sampled"] = "exact" if gumbel is None else "sampled"
        noise = Noise(eps.unsqueeze(0), None if gumbel is None else gumbel.unsqueeze(0))
        terms = objective(
            {name: value.unsqueeze(0) for name, value in self.weights.items()},
            x.unsqueeze(0),
            labels.unsqueeze(0),
            is_labelled.unsqueeze(0),
            x.new_full((1,), self.alpha),
            noise,
            dataclasses.replace(self.hyper, unlabelled=kind),
        )
        # No views: FSDP puts a hook on what a module returns, which a view might lose.
        return Terms(*(term.squeeze(0).clone() for term in terms))
