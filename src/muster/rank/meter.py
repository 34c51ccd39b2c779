"""What training costs: the time of a step and where it goes, memory, operations (MFU).

MFU = FLOPs of forward and backward per sample x samples/s / peak FLOP/s of all cards (Chowdhery et
al. 2022, "PaLM", appendix B). What is computed again for activation checkpointing does not count.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from muster.base.codec import write_json
from muster.devices.cards import Precision, find_card


@dataclass
class Tally:
    """Sums since ``start``: seconds, samples and steps."""

    seconds: float = 0.0
    samples: int = 0
    steps: int = 0
    data_wait_s: float = 0.0
    communication_s: float = 0.0
    checkpoint_s: float = 0.0

    @property
    def samples_per_s(self) -> float | None:
        return self.samples / self.seconds if self.seconds > 0 else None

    def share(self, seconds: float) -> float | None:
        return seconds / self.seconds if self.seconds > 0 else None


class Meter:
    """Measures whole steps; what is not a step (evaluation, start-up) is not counted.

    ``total`` leaves out the first ``warmup`` steps, which compile, allocate and connect.
    """

    def __init__(self, warmup: int = 3) -> None:
        self.total = Tally()
        self.recent = Tally()
        self.step = Tally()
        self._warmup = warmup
        self._seen = 0
        self._began = 0.0

    def begin_step(self) -> None:
        step = self.step
        step.data_wait_s = step.communication_s = 0.0
        self._began = time.perf_counter()

    def end_step(self, samples: int) -> None:
        step = self.step
        step.seconds = time.perf_counter() - self._began
        step.samples = samples
        self._seen += 1
        if self._seen <= self._warmup:
            return
        for tally in (self.total, self.recent):
            tally.seconds += step.seconds
            tally.samples += samples
            tally.steps += 1
            tally.data_wait_s += step.data_wait_s
            tally.communication_s += step.communication_s

    def add_checkpoint(self, seconds: float) -> None:
        """A save between two steps, as far as training has waited for it."""
        for tally in (self.total, self.recent):
            tally.seconds += seconds
            tally.checkpoint_s += seconds

    def take_recent(self) -> Tally:
        """What has been added since this was last asked."""
        recent, self.recent = self.recent, Tally()
        return recent


def free_cached(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()


def peak_memory_mib(device: torch.device) -> float | None:
    """Peak of what tensors took on ``device`` since the last reset; None on a CPU."""
    if device.type != "cuda":
        return None
    return torch.cuda.max_memory_allocated(device) / 2**20


def memory_sentence(device: torch.device) -> str:
    """Free and total memory of ``device`` in words; empty on a CPU."""
    if device.type != "cuda":
        return ""
    free, total = torch.cuda.mem_get_info(device)
    return f"{free / 2**20:,.0f} of {total / 2**20:,.0f} MiB are free on {device}"


def remember_micro_batch(path: Path, micro_batch: int, global_batch: int, num_ranks: int) -> None:
    """Keep for the next start what was found to fit."""
    write_json(
        path,
        {"micro_batch": micro_batch, "global_batch": global_batch, "num_ranks": num_ranks},
    )


def remembered_micro_batch(path: Path) -> int | None:
    """The micro-batch an earlier start of this run had to go down to, if any."""
    with suppress(OSError, ValueError, RecursionError, LookupError, TypeError, OverflowError):
        return int(json.loads(path.read_bytes())["micro_batch"])
    return None


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
