"""What the flags for a machine do to a worker process: quiet libraries, TF32, 8-bit weights."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import logging
import sys
import warnings
from dataclasses import dataclass

from muster.generation import EngineSpec

_log = logging.getLogger("muster")
#: Everything but muster: a pattern for the beginning of a module's name.
_THIRD_PARTIES = r"(?!muster(\.|_|$))"
_THEIR_LOGGERS = ("transformers", "datasets", "huggingface_hub", "torch", "vllm", "openai", "httpx")


#: What ``speed_up`` sets.
SPEED_UPS = (
    "TF32 is on for float32 matrix products (10 bits of fraction instead of 23)",
    "cuDNN times its algorithms and takes the fastest",
)


@dataclass(frozen=True, kw_only=True)
class Host:
    """``low_memory`` here means 8-bit weights where the device and the libraries have them."""

    optimize_gpu: bool = False
    no_warnings: bool = False
    low_memory: bool = False


def prepare(host: Host, device: str) -> list[str]:
    """Apply the settings to this process before a model is loaded; says, and logs, what was set.

    Doing it twice is the same as once.
    """
    lines: list[str] = []
    if host.no_warnings:
        lines.append(quiet_third_parties())
    if host.optimize_gpu:
        lines += speed_up(device)
    for line in lines:
        say_once(line)
    return lines


@functools.cache
def say_once(line: str) -> None:
    """Log ``line``, unless it has been: each stage of a worker prepares its process."""
    _log.info("%s", line)


def quiet_third_parties() -> str:
    """Switch off warnings and log lines below errors of third parties; those of muster stay."""
    warnings.filterwarnings("ignore", module=_THIRD_PARTIES)
    for name in _THEIR_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    # Its level is set when it is first imported, over ours.
    if importlib.util.find_spec("huggingface_hub") is not None:
        importlib.import_module("huggingface_hub.utils.logging").set_verbosity_error()
    # Both keep a level of their own, which they set up when they are imported.
    for name in ("transformers", "datasets"):
        if name in sys.modules:
            sys.modules[name].utils.logging.set_verbosity_error()
    return "warnings of third parties are off"


def speed_up(device: str) -> list[str]:
    """Allow TF32 for float32 products and cuDNN's choice by timing in this process."""
    if not device.startswith("cuda"):
        return [f"--optimize-gpu sets nothing on {device}: TF32 and cuDNN are of CUDA devices"]
    import torch

    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    return list(SPEED_UPS)


def fitted(spec: EngineSpec, host: Host, device: str) -> EngineSpec:
    """The spec as it is used on ``device``: with ``low_memory`` in 8 bits where that works."""
    if not host.low_memory or spec.quantize != "none" or spec.engine != "transformers":
        return spec
    if not device.startswith("cuda"):
        say_once("--low-memory keeps the weights' precision: 8 bits need a CUDA device")
        return spec
    if importlib.util.find_spec("bitsandbytes") is None:
        say_once(
            "--low-memory keeps the weights' precision: 8 bits need the package bitsandbytes "
            "(pip install 'muster-gpu[quantize]')"
        )
        return spec
    return dataclasses.replace(spec, quantize="8bit")
