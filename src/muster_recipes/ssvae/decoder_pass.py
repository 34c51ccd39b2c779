"""log p(x|y,z) of the decoder on a CPU, in pieces that stay in the processor's cache.

Plain autograd keeps the decoder's hidden layer of every image, class and sample: 10 MB per run
and step, written, read and handed back to the system each time, which takes longer than the
arithmetic. Here only the pixels' residuals are kept and the hidden layer is computed again in the
backward, from its few inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

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
