"""Which floating-point types a model computes in: what was asked for, and what is in force."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from muster.base.errors import UsageError
from muster.gang.stall import name_ranks
from muster.rank.process_group import NOTHING, Gang
from muster.rank.task import raise_together


@dataclass(frozen=True, kw_only=True)
class Precision:
    """``dtype``: what autocast uses, None without autocast. Only fp16 needs loss scaling."""

    name: Literal["fp32", "tf32", "bf16", "fp16"]
    why: str
    device_type: str
    dtype: torch.dtype | None = None

    def autocast(self) -> AbstractContextManager[Any]:
        if self.dtype is None:
            return NOTHING
        return torch.autocast(self.device_type, dtype=self.dtype)

    def scaler(self) -> torch.amp.GradScaler | None:
        if self.name != "fp16":
            return None
        return torch.amp.GradScaler(self.device_type)

    def __str__(self) -> str:
        return f"{self.name} ({self.why})"


#: From the strongest to what every device can compute in.
_WEAKER = ("bf16", "fp16", "fp32")


def agree_on_precision(wanted: str, gang: Gang) -> Precision:
    """The one precision of all ranks, because gradients of two must not be added up.

    "auto" is the best that the weakest device can do. Raises UsageError on every rank where the
    device of any rank cannot do what was asked for.
    """
    if wanted != "auto":
        raise_together(gang.council, _refusal(wanted, gang.device, gang.rank))
        return _in_force(wanted, "as given", gang.device)
    own = _automatic(gang.device)
    every = gang.council.gather(own)
    name, why = max(every, key=lambda each: _WEAKER.index(each[0]))
    if any(each[0] != name for each in every):
        who = name_ranks([rank for rank, each in enumerate(every) if each[0] == name])
        why = f"{why}, which decides for all: {who}"
    return _in_force(name, why, gang.device)


def use_tf32(is_on: bool) -> None:
    """Set whether products of fp32 may round their inputs to 10 bits on an NVIDIA GPU."""
    # torch 2.9 to 2.11 warn of these names, but the new ones break torch.compile there, which
    # reads the old ones and refuses a mixture.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Please use the new API settings")
        torch.backends.cuda.matmul.allow_tf32 = is_on
        torch.backends.cudnn.allow_tf32 = is_on


def _in_force(name: str, why: str, device: torch.device) -> Precision:
    if device.type == "cuda":
        use_tf32(name != "fp32")  # fp32 is not rounded to TF32
    kind: Any = name
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(name)
    return Precision(name=kind, why=why, device_type=device.type, dtype=dtype)


def _refusal(wanted: str, device: torch.device, rank: int = 0) -> UsageError | None:
    """Why ``device`` cannot do it."""
    is_cuda = device.type == "cuda"
    if wanted == "tf32" and not (is_cuda and torch.cuda.get_device_capability(device) >= (8, 0)):
        return UsageError(
            f"--precision tf32 needs an NVIDIA GPU of the Ampere generation or later; "
            f"this is {device}.",
            hint="use --precision auto.",
        )
    if wanted == "bf16" and is_cuda and not torch.cuda.is_bf16_supported(False):
        return UsageError(
            f"--precision bf16: {torch.cuda.get_device_name(device)} of rank {rank} has no bf16.",
            hint="use --precision fp16 or auto.",
        )
    return None


def _automatic(device: torch.device) -> tuple[str, str]:
    if device.type != "cuda":
        return "fp32", f"auto: {device.type} has no faster type that is known to pay"
    name = torch.cuda.get_device_name(device)
    if torch.cuda.is_bf16_supported(False):
        return "bf16", f"auto: {name} has it"
    return "fp16", f"auto: {name} has no bf16"
