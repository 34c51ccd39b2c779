"""What training costs: the time of a step and its parts, memory, and operations (MFU).

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
    """Measures training by the clock: steps and what lies between them, and nothing else.

    A GPU is steps behind its host, so that the time between two calls here says little about a
    step. The sum over many is right because the clock runs on until ``pause``, which is called
    before anything else (an evaluation) when the device has done all steps that were counted.
    ``total`` leaves out the first ``warmup`` steps, which compile, allocate and connect.
    """

    def __init__(self, warmup: int = 3, clock: Callable[[], float] = time.perf_counter) -> None:
        self.total = Tally()
        self.recent = Tally()
        self.step = Tally()
        self._warmup = warmup
        self._clock = clock
        self._seen = 0
        self._began = 0.0
        self._counted_until: float | None = None  # None: the clock stands still

    def begin_step(self) -> None:
        self._began = self._start_clock()
        self.step.data_wait_s = self.step.communication_s = 0.0

    def end_step(self, samples: int) -> None:
        """Count a step; ``step.seconds`` is what the host took for it."""
        step = self.step
        self._seen += 1
        step.seconds = self._count_time() - self._began
        for tally in self._counting():
            tally.samples += samples
            tally.steps += 1
            tally.data_wait_s += step.data_wait_s
            tally.communication_s += step.communication_s

    def pause(self) -> None:
        """Stop the clock until the next step or checkpoint."""
        if self._counted_until is not None:
            self._count_time()
            self._counted_until = None

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Count the time inside, in which training waits for a checkpoint."""
        began = self._start_clock()
        yield
        seconds = self._count_time() - began
        for tally in self._counting():
            tally.checkpoint_s += seconds

    def take_recent(self) -> Tally:
        """What has been added since this was last asked."""
        recent, self.recent = self.recent, Tally()
        return recent

    def _start_clock(self) -> float:
        now = self._clock()
        if self._counted_until is None:
            self._counted_until = now
        return now

    def _count_time(self) -> float:
        assert self._counted_until is not None
        now = self._clock()
        for tally in self._counting():
            tally.seconds += now - self._counted_until
        self._counted_until = now
        return now

    def _counting(self) -> tuple[Tally, ...]:
        return () if self._seen <= self._warmup else (self.total, self.recent)


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
    """The smaller micro-batch that an earlier start of this run found to fit, if any."""
    with suppress(OSError, ValueError, RecursionError, LookupError, TypeError, OverflowError):
        return int(json.loads(path.read_bytes())["micro_batch"])
    return None


class Flops(NamedTuple):
    """``per_sample``: floating-point operations of forward and backward; ``peak``: per second,
    None where it is not known.
    """

    per_sample: float
    peak: float | None

    def utilisation(self, samples_per_s: float | None, num_cards: int) -> float | None:
        """The share of what all cards could compute (MFU)."""
        if samples_per_s is None or self.peak is None:
            return None
        return self.per_sample * samples_per_s / (self.peak * num_cards)


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
    """List the bytes of every tensor that autograd keeps for the backward inside, each once.

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
    """The name that the driver gives a device; "" for a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""
