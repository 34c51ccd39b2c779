"""The objective of the semi-supervised VAE, in nats per image, to be maximised.

Model M2 of Kingma, Rezende, Mohamed, Welling (2014), "Semi-supervised learning with deep
generative models": equation 6 with a label, 7 without, and 9 for the classifier's own term;
log p(z) - log q(z|x,y) is estimated by the drawn styles.

Plain autograd keeps the decoder's hidden layer of every image, class and sample: 10 MB per run
and step, written, read and handed back to the system each time, which takes longer than the
arithmetic. Here only the pixels' residuals are kept, and the backward computes the hidden layer
again from its few inputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from muster_recipes.ssvae.config import Hyper
from muster_recipes.ssvae.networks import (
    Parameters,
    Style,
    class_logits,
    decode,
    decoder_inputs,
    style,
)
from muster_recipes.ssvae.noise import Noise


class Terms(NamedTuple):
    """Values per image in nats, [R, B] each but ``log_q`` [R, B, C].

    ``objective`` = ``bound`` + alpha * ``log_q_label``. ``bound``: the lower bound on log p(x, y)
    with a label, on log p(x) without. ``log_q_label``: log q(y|x) of the label, 0 without one.
    ``log_q``: log q(y|x) of every class.
    """

    objective: Tensor
    bound: Tensor
    log_q_label: Tensor
    log_q: Tensor


def objective(
    p: Parameters,
    x: Tensor,
    labels: Tensor,
    is_labelled: Tensor,
    alpha: Tensor,
    noise: Noise,
    hyper: Hyper,
) -> Terms:
    """The objective of images ``x`` [R, B, D]; its gradient is unbiased for "exact".

    ``labels``: int64 [R, B], any number where ``is_labelled`` (bool [R, B]) is False. ``alpha``:
    [R], the weight of the classifier's own term. Without a label, "exact" sums over the classes;
    "sampled" takes one relaxed class per style, which is biased.
    """
    hidden, logits = class_logits(p, x)
    log_q = F.log_softmax(logits, -1)
    known = labels.where(is_labelled, 0).unsqueeze(-1)
    log_q_label = log_q.gather(-1, known).squeeze(-1).where(is_labelled, 0)
    if hyper.unlabelled == "exact":
        bounds = class_log_weights(p, x, hidden, noise.eps).mean(-1)
        with_label = bounds.gather(-1, known).squeeze(-1)
        bound = torch.where(is_labelled, with_label, over_classes(bounds, log_q))
    else:
        y = relaxed_classes(logits, known, is_labelled, noise, hyper.temperature)
        bound = sampled_bound(p, x, hidden, log_q, y, is_labelled, noise.eps)
    return Terms(bound + alpha.unsqueeze(-1) * log_q_label, bound, log_q_label, log_q)


def class_log_weights(p: Parameters, x: Tensor, hidden: Tensor, eps: Tensor) -> Tensor:
    """log p(y) + log p(x|y,z_s) + log p(z_s) - log q(z_s|x,y), [R, B, C, S], for every class y.

    Its mean over the styles estimates the bound on log p(x, y).

    ``hidden`` [R, B, H] is the classifier's; ``eps`` [R, B, S, L] is shared by the classes.
    """
    num_classes = p["classifier_bias"].shape[-1]
    classes = torch.eye(num_classes, dtype=x.dtype, device=x.device)
    given = style(p, hidden, classes[None, None])
    z, log_ratio = draw(Style(*(part.unsqueeze(3) for part in given)), eps.unsqueeze(2))
    log_p = pixels_log_likelihood(p, classes[None, None, :, None], z, x)
    return log_p + log_ratio - math.log(num_classes)


def over_classes(bounds: Tensor, log_q: Tensor) -> Tensor:
    """sum_y q(y|x) (bound_y - log q(y|x)): [R, B, C] twice to [R, B]."""
    return (log_q.exp() * (bounds - log_q)).sum(-1)


def relaxed_classes(
    logits: Tensor, known: Tensor, is_labelled: Tensor, noise: Noise, temperature: float
) -> Tensor:
    """A class per style, [R, B, S, C]: the label as one-hot, or a Gumbel-softmax sample.

    Jang, Gu, Poole (2017), "Categorical reparameterization with Gumbel-softmax", equation 2.
    """
    assert noise.gumbel is not None
    drawn = F.softmax((logits.unsqueeze(2) + noise.gumbel.to(logits.dtype)) / temperature, -1)
    one_hot = F.one_hot(known, logits.shape[-1]).to(logits.dtype)  # known: [R, B, 1]
    return torch.where(is_labelled[..., None, None], one_hot, drawn)


def sampled_bound(
    p: Parameters,
    x: Tensor,
    hidden: Tensor,
    log_q: Tensor,
    y: Tensor,
    is_labelled: Tensor,
    eps: Tensor,
) -> Tensor:
    """The bound with one class ``y`` [R, B, S, C] per style; [R, B].

    log q(y|x) of a relaxed class is sum_k y_k log q(k|x), the categorical log-probability
    continued linearly (the prior, log 1/C, is categorical as well). With a label it is left out.
    """
    z, log_ratio = draw(style(p, hidden, y), eps)
    log_p = pixels_log_likelihood(p, y, z, x)
    log_q_class = (y * log_q.unsqueeze(2)).sum(-1).where(~is_labelled.unsqueeze(-1), 0)
    return (log_p + log_ratio - log_q_class).mean(-1) - math.log(y.shape[-1])


def draw(given: Style, eps: Tensor) -> tuple[Tensor, Tensor]:
    """Styles z = mean + std * eps [..., L] and log p(z) - log q(z|x,y) [...], which broadcast."""
    eps = eps.to(given.mean.dtype)
    z = torch.addcmul(given.mean, given.log_std.exp(), eps)
    # The terms in log 2 pi of the two normal densities cancel.
    return z, (0.5 * (eps.square() - z.square()) + given.log_std).sum(-1)


def pixels_log_likelihood(p: Parameters, y: Tensor, z: Tensor, x: Tensor) -> Tensor:
    """log p(x|y,z) [R, B, ...] of styles ``z`` [R, B, ..., L]; ``y`` is broadcast against them."""
    # On a GPU autograd is fast enough, and a compiler cuts the work into pieces of its own.
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return log_likelihood(decode(p, y, z), x)
    inputs, first = decoder_inputs(p, y, z)
    log_p = decoder_log_likelihood(
        inputs.flatten(2, -2), first, p["pixels_weight"], p["pixels_bias"], x
    )
    return log_p.view(z.shape[:-1])


def log_likelihood(logits: Tensor, x: Tensor) -> Tensor:
    """Bernoulli log p(x|y,z) [R, B, ...] of pixels ``x`` [R, B, D] under ``logits`` [R, B, ..., D].

    sum_d x_d l_d - log(1 + exp(l_d)), which holds for grey values as the cross-entropy does.
    """
    rows = logits.flatten(0, 1).flatten(1, -2)
    dots = torch.bmm(rows, x.flatten(0, 1).unsqueeze(-1)).view(logits.shape[:-1])
    return dots - F.softplus(logits).sum(-1)


#: Bytes of hidden layer and pixels in one piece; about half of a core's second-level cache.
_PIECE_BYTES = 1 << 20


def decoder_log_likelihood(
    inputs: Tensor, first: Tensor, second: Tensor, bias: Tensor, x: Tensor
) -> Tensor:
    """Bernoulli log-likelihood [R, B, K] of pixels ``x`` [R, B, D] under K decodings each.

    The logits are relu(inputs first) second + bias, with ``inputs`` [R, B, K, I], ``first``
    [R, I, H], ``second`` [R, H, D] and ``bias`` [R, D]. Differentiable once, in all but ``x``.
    """
    tensors = (inputs, first, second, bias)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        result: Tensor = _Decoder.apply(*tensors, x)  # type: ignore[no-untyped-call]
        return result
    return _forward(*tensors, x, None)


class _Decoder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        inputs, first, second, bias, x = tensors
        residual = x.new_empty(*inputs.shape[:3], x.shape[-1])
        ctx.save_for_backward(inputs, first, second, residual)
        return _forward(inputs, first, second, bias, x, residual)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return (*_backward(*ctx.saved_tensors, *gradients), None)


def _forward(
    inputs: Tensor, first: Tensor, second: Tensor, bias: Tensor, x: Tensor, residual: Tensor | None
) -> Tensor:
    """The log-likelihoods; into ``residual`` [R, B, K, D] their gradients by the logits."""
    width, num_pixels = second.shape[1:]
    result = inputs.new_empty(inputs.shape[:3])
    for run, images, rows in _pieces(inputs, width + num_pixels):
        hidden = (rows @ first[run]).relu_()
        logits = torch.addmm(bias[run], hidden, second[run])
        pixels = x[run, images]
        by_image = logits.view(len(pixels), -1, num_pixels)
        dots = torch.bmm(by_image, pixels.unsqueeze(-1)).squeeze(-1)
        torch.sub(dots, F.softplus(by_image).sum(-1), out=result[run, images])
        if residual is not None:
            torch.sub(pixels.unsqueeze(1), by_image.sigmoid_(), out=residual[run, images])
    return result


def _backward(
    inputs: Tensor, first: Tensor, second: Tensor, residual: Tensor, gradient: Tensor
) -> tuple[Tensor, ...]:
    """Gradients by inputs, first, second and bias, given that by the log-likelihoods [R, B, K]."""
    width, num_pixels = second.shape[1:]
    by_inputs = torch.empty_like(inputs)
    by_first, by_second = torch.zeros_like(first), torch.zeros_like(second)
    by_bias = second.new_zeros(len(second), num_pixels)
    for run, images, rows in _pieces(inputs, 2 * width + num_pixels):
        hidden = (rows @ first[run]).relu_()
        scaled = residual[run, images] * gradient[run, images].unsqueeze(-1)
        by_logits = scaled.view(-1, num_pixels)
        by_bias[run] += by_logits.sum(0)
        by_second[run].addmm_(hidden.t(), by_logits)
        by_hidden = by_logits @ second[run].t()
        torch.ops.aten.threshold_backward.grad_input(by_hidden, hidden, 0, grad_input=by_hidden)
        by_first[run].addmm_(rows.t(), by_hidden)
        torch.mm(by_hidden, first[run].t(), out=by_inputs[run, images].view_as(rows))
    return by_inputs, by_first, by_second, by_bias


def _pieces(inputs: Tensor, columns: int) -> Iterator[tuple[int, slice, Tensor]]:
    """Runs, images and their rows [n, I], with about ``_PIECE_BYTES`` for n x ``columns``."""
    num_runs, num_images, per_image, num_inputs = inputs.shape
    size = max(1, _PIECE_BYTES // (per_image * columns * inputs.element_size()))
    for run in range(num_runs):
        for start in range(0, num_images, size):
            images = slice(start, start + size)
            yield run, images, inputs[run, images].reshape(-1, num_inputs)
