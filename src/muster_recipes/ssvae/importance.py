"""log p(x) by importance sampling, to judge how tight the bound is."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from muster_recipes.ssvae.hyper import Hyper
from muster_recipes.ssvae.networks import class_logits
from muster_recipes.ssvae.noise import normals
from muster_recipes.ssvae.objective import class_log_weights
from muster_recipes.ssvae.parameters import Parameters


@torch.no_grad()
def log_marginal(
    p: Parameters, x: Tensor, keys: Tensor, hyper: Hyper, *, num_samples: int = 1000
) -> Tensor:
    """An estimate of log p(x), nats [R, B], for pixels ``x`` [R, B, D].

    log (1/K) sum_k sum_y p(y) p(x|y,z_k) p(z_k) / q(z_k|x,y) with K = ``num_samples`` styles from
    q(z|x,y): equation 8 of Burda, Grosse, Salakhutdinov (2016), "Importance weighted
    autoencoders", with the class summed exactly. Its mean is a lower bound on log p(x) that
    tightens as K grows. ``keys`` [R, B]: of the noise, see ``noise``. K x C decodings per image
    are held at once: split x where memory is short.
    """
    eps = normals(keys, num_samples * hyper.num_style).view(*keys.shape, num_samples, -1)
    log_weights = class_log_weights(p, x, class_logits(p, x).hidden, eps)
    return log_weights.flatten(2).logsumexp(-1) - math.log(num_samples)
