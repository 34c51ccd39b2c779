"""Model FLOPs utilisation: what a model computes per sample, and what the card could compute.

MFU = FLOPs of forward and backward per sample x samples/s / peak FLOP/s of all cards (Chowdhery et
al. 2022, "PaLM", appendix B). What is computed again for activation checkpointing does not count.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

#: Dense TFLOP/s from NVIDIA's data sheets (those with sparsity halved; fp16 and bf16 with fp32
#: accumulation): fp32 outside tensor cores, tf32, bf16, fp16. None: the card cannot.
_PEAKS: tuple[tuple[str, tuple[float | None, float | None, float | None, float | None]], ...] = (
    (r"(?<!G)B200", (75.0, 1100.0, 2250.0, 2250.0)),
    (r"H[12]00 NVL", (60.0, 417.5, 835.5, 835.5)),
    (r"H200|H100 (SXM|80GB HBM3)", (67.0, 494.7, 989.4, 989.4)),
    (r"H100 PCIe", (51.0, 378.0, 756.0, 756.0)),
    (r"A100", (19.5, 156.0, 312.0, 312.0)),
    (r"A30\b", (10.3, 82.0, 165.0, 165.0)),
    (r"A10\b", (31.2, 62.5, 125.0, 125.0)),
    (r"L40S", (91.6, 183.0, 362.0, 362.0)),
    (r"L40\b", (90.5, 90.5, 181.0, 181.0)),
    (r"L4\b", (30.3, 60.0, 121.0, 121.0)),
    (r"V100-SXM", (15.7, None, None, 125.0)),
    (r"T4\b", (8.1, None, None, 65.0)),
    (r"RTX 4090(?! D| Laptop)", (82.6, 82.6, 165.2, 165.2)),
    (r"RTX 3090(?! Ti)", (35.6, 35.6, 71.0, 71.0)),
)
_NAMES = ("fp32", "tf32", "bf16", "fp16")


class Flops(NamedTuple):
    """``per_sample``: floating-point operations of forward and backward; ``peak``: per second."""

    per_sample: float
    peak: float

    def utilisation(self, samples_per_s: float | None, num_ranks: int) -> float | None:
        """The share of what all cards could compute (MFU)."""
        if samples_per_s is None:
            return None
        return self.per_sample * samples_per_s / (self.peak * num_ranks)


def peak_flops(card: str, precision: str) -> float | None:
    """Dense peak of a card by the name its driver gives, in FLOP/s; None where it is not known.

    >>> peak_flops("NVIDIA H100 80GB HBM3", "bf16")
    989400000000000.0
    >>> peak_flops("Tesla V100-SXM2-16GB", "bf16") is None
    True
    """
    for pattern, values in _PEAKS:
        if re.search(pattern, card):
            value = values[_NAMES.index(precision)]
            return None if value is None else value * 1e12
    return None


def count_flops(model: nn.Module, run: Callable[[], object]) -> int | None:
    """Operations of the products, convolutions and attentions in ``run``.

    None where ``model`` has recurrent layers, whose fused kernels torch does not count.
    """
    if any(isinstance(module, nn.RNNBase) for module in model.modules()):
        return None
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops() or None


def card_name(device: torch.device) -> str:
    """The name its driver gives a device; "" for a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""
