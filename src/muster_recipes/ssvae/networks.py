"""Encoder and decoder of many runs at once: pure functions of the weights.

The leading dimension R is the run; runs never mix. Layers of Narayanaswamy et al. (2017),
"Learning Disentangled Representations with Semi-Supervised Deep Generative Models": a classifier
q(y|x), a style q(z|x,y) on the classifier's hidden layer, and a decoder p(x|y,z).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from muster_recipes.ssvae.config import Hyper

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


class Classes(NamedTuple):
    """``hidden`` [R, B, H] after its ReLU; ``logits`` [R, B, C] of q(y|x)."""

    hidden: Tensor
    logits: Tensor


class Style(NamedTuple):
    """q(z|x,y) = N(mean, exp(log_std)**2), both [R, B, ..., L]."""

    mean: Tensor
    log_std: Tensor


def class_logits(p: Parameters, x: Tensor) -> Classes:
    """The classifier on pixels ``x`` [R, B, D] in [0, 1]."""
    hidden = _linear(x, p["encoder_weight"], p["encoder_bias"]).relu_()
    return Classes(hidden, _linear(hidden, p["classifier_weight"], p["classifier_bias"]))


def style(p: Parameters, hidden: Tensor, y: Tensor) -> Style:
    """The style of each image given a class ``y``, one-hot or soft: [R, B, C] or [R, B, n, C].

    A leading 1 in place of R or B serves all runs or images: [1, 1, C, C], the identity matrix,
    asks for the style under every class, whose cost is that of one (the layer is split into
    W_h h + W_y y + b).
    """
    weight, num_classes = p["style_weight"], p["classifier_bias"].shape[-1]
    from_hidden = torch.bmm(hidden, weight[:, num_classes:])
    from_class = _on_rows(y, weight[:, :num_classes], p["style_bias"])
    if y.dim() == 4:
        from_hidden = from_hidden.unsqueeze(2)
    mean, log_std = (from_hidden + from_class).chunk(2, dim=-1)
    return Style(mean, log_std)


def decode(p: Parameters, y: Tensor, z: Tensor) -> Tensor:
    """Logits of the pixels, [R, ..., D], for styles ``z`` [R, ..., L].

    ``y`` [..., C] has as many dimensions as ``z`` and is broadcast against it.
    """
    rows, first = decoder_inputs(p, y, z)
    # No view lies between the product and what is done to it in place: autograd would keep both
    # apart by copies of the largest tensors of a step.
    hidden = torch.bmm(rows.flatten(1, -2), first).relu_()
    logits = _linear(hidden, p["pixels_weight"], p["pixels_bias"])
    return logits.view(*z.shape[:-1], -1)


def decoder_inputs(p: Parameters, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """Class, style and 1, [R, ..., I], and the decoder's first layer for them, [R, I, H]."""
    shape = z.shape[:-1]
    inputs = torch.cat([y.expand(*shape, -1).to(z.dtype), z, z.new_ones(1).expand(*shape, 1)], -1)
    return inputs, torch.cat([p["decoder_weight"], p["decoder_bias"].unsqueeze(1)], 1)


def _linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x W + b of every run: ``x`` [R, n, inputs]."""
    return torch.baddbmm(bias.unsqueeze(1), x, weight)


def _on_rows(y: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """y W + b [R, ..., outputs] for ``y`` [R or 1, ..., C]."""
    rows = y.flatten(1, -2).to(weight.dtype).expand(len(weight), -1, -1)
    return _linear(rows, weight, bias).view(len(weight), *y.shape[1:-1], -1)
