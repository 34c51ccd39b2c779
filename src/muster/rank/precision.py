"""Which numbers a model computes in: what was asked for, and what is really in force."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch

from muster.base.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Precision:
    """``dtype``: what autocast uses, None without autocast. Only fp16 needs loss scaling."""

    name: Literal["fp32", "tf32", "bf16", "fp16"]
    why: str
    device_type: str
    dtype: torch.dtype | None = None

    def autocast(self) -> AbstractContextManager[Any]:
        if self.dtype is None:
            return nullcontext()
        return torch.autocast(self.device_type, dtype=self.dtype)

    def scaler(self) -> torch.amp.GradScaler | None:
        if self.name != "fp16":
            return None
        return torch.amp.GradScaler(self.device_type)

    def __str__(self) -> str:
        return f"{self.name} ({self.why})"


def resolve_precision(wanted: str, device: torch.device) -> Precision:
    """The precision that ``wanted`` means on ``device``, by its type and not by its name.

    Raises UsageError where the device cannot do it.
    """
    kind = device.type
    if wanted == "auto":
        wanted, why = _automatic(device)
    else:
        why = "as given"
    if wanted == "tf32" and not (kind == "cuda" and _capability(device) >= (8, 0)):
        raise UsageError(
            f"--precision tf32 needs an NVIDIA GPU of the Ampere generation or later; "
            f"this is {device}.",
            hint="use --precision auto.",
        )
    if wanted == "bf16" and kind == "cuda" and not torch.cuda.is_bf16_supported(False):
        raise UsageError(
            f"--precision bf16: {torch.cuda.get_device_name(device)} has no bf16.",
            hint="use --precision fp16 or auto.",
        )
    if kind == "cuda":
        # tf32 rounds the inputs of fp32 products to 10 bits; fp32 means what it says.
        torch.backends.cuda.matmul.allow_tf32 = wanted != "fp32"
        torch.backends.cudnn.allow_tf32 = wanted != "fp32"
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(wanted)
    return Precision(name=wanted, why=why, device_type=kind, dtype=dtype)  # type: ignore[arg-type]


def _automatic(device: torch.device) -> tuple[str, str]:
    if device.type != "cuda":
        return "fp32", f"auto: {device.type} has no faster type that is known to pay"
    name = torch.cuda.get_device_name(device)
    if torch.cuda.is_bf16_supported(False):
        return "bf16", f"auto: {name} has it"
    return "fp16", f"auto: {name} has no bf16"


def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
