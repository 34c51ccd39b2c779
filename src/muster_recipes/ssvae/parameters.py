"""The weights of many runs as one set of tensors with a leading run dimension."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from muster_recipes.ssvae.hyper import Hyper

#: Every tensor is [R, ...]: ``*_weight`` [R, inputs, outputs], ``*_bias`` [R, outputs].
Parameters = dict[str, Tensor]

_SEED_BITS = 63  # what Generator.manual_seed takes


def layer_sizes(hyper: Hyper) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of every linear layer.

    The inputs of ``style`` are [y; h] and its outputs [mean; log_std]; the inputs of
    ``decoder`` are [y; z].
    """
    classes, style, hidden = hyper.num_classes, hyper.num_style, hyper.num_hidden
    return {
        "encoder": (hyper.num_pixels, hidden),
        "classifier": (hidden, classes),
        "style": (classes + hidden, 2 * style),
        "decoder": (classes + style, hidden),
        "pixels": (hidden, hyper.num_pixels),
    }


def init_parameters(hyper: Hyper, seeds: Sequence[int]) -> Parameters:
    """Fresh float32 weights of one run per seed, on the CPU; run r depends on ``seeds[r]`` only.

    Weights and biases are uniform in +-1/sqrt(inputs), as torch.nn.Linear's are by default.
    """
    runs = [_init_run(hyper, seed) for seed in seeds]
    return {name: torch.stack([run[name] for run in runs]) for name in runs[0]}


def _init_run(hyper: Hyper, seed: int) -> Parameters:
    stream = torch.Generator().manual_seed(seed % 2**_SEED_BITS)
    made: Parameters = {}
    for layer, (inputs, outputs) in layer_sizes(hyper).items():
        bound = 1 / math.sqrt(inputs)
        for name, shape in ((f"{layer}_weight", (inputs, outputs)), (f"{layer}_bias", (outputs,))):
            made[name] = torch.empty(shape).uniform_(-bound, bound, generator=stream)
    return made
