"""Out of memory: recognising it, remembering what fits, and the numbers for the error."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import torch

from muster.base.codec import write_json

_CPU_TEXTS = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
)
_OTHER_TEXTS = ("CUDA out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` means that memory ran out, on any device."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and any(t in text for t in _CPU_TEXTS + _OTHER_TEXTS)


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
