"""Model FLOPs utilisation: what a model computes per sample, and what the card could compute.

MFU = FLOPs of forward and backward per sample x samples/s / peak FLOP/s of all cards (Chowdhery et
al. 2022, "PaLM", appendix B). What is computed again for activation checkpointing does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from muster.devices.cards import Precision, find_card


class Flops(NamedTuple):
    """``per_sample``: floating-point operations of forward and backward; ``peak``: per second,
    None where it is not known."""

    per_sample: float
    peak: float | None

    def utilisation(self, samples_per_s: float | None, num_ranks: int) -> float | None:
        """The share of what all cards could compute (MFU)."""
        if samples_per_s is None or self.peak is None:
            return None
        return self.per_sample * samples_per_s / (self.peak * num_ranks)


def peak_flops(card: str, precision: Precision) -> float | None:
    """Dense peak of a card by the name its driver gives, in FLOP/s; None where it is not known."""
    known = find_card(card)
    return None if known is None else known.peak_flops(precision)


def count_flops(model: nn.Module, run: Callable[[], object]) -> int | None:
    """Operations of the products, convolutions and attentions in ``run``.

    None where ``model`` has recurrent layers, whose fused kernels torch does not count.
    """
    if any(isinstance(module, nn.RNNBase) for module in model.modules()):
        return None
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops() or None


@contextmanager
def kept_bytes(model: nn.Module) -> Iterator[list[int]]:
    """Inside: the bytes of every tensor that autograd keeps for the backward, each once.

    Parameters are left out; what they take is known. A view counts as the whole it is a view of.
    """
    own = {tensor.untyped_storage().data_ptr() for tensor in model.parameters()}
    sizes: list[int] = []
    held: list[torch.Tensor] = []  # so that no address is used again

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            own.add(storage.data_ptr())
            sizes.append(storage.nbytes())
            held.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        yield sizes


def card_name(device: torch.device) -> str:
    """The name its driver gives a device; "" for a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""
