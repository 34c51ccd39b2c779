"""A stage and its engine: how it is asked, how many tokens a record has spent there, and what the
flags for a machine do to a worker process: quiet libraries, TF32, 8-bit weights.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import logging
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from muster import Reject, seed_of
from muster.generation import (
    Completion,
    Engine,
    EngineSpec,
    Message,
    Request,
    RequestError,
    Sampling,
)

if TYPE_CHECKING:
    from muster.generation import Lent

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


class Asking:
    """One stage's use of an engine: it opens it, asks it and lets it go."""

    def __init__(self, spec: EngineSpec, host: Host) -> None:
        self._spec = spec
        self._host = host
        self._engine: Engine | None = None
        self._lent: Lent | None = None

    @property
    def concurrency(self) -> int:
        return 1 if self._engine is None else self._engine.concurrency

    async def open(self, device: str) -> None:
        from muster.generation import shared

        prepare(self._host, device)
        self._lent = await shared(fitted(self._spec, self._host, device), device)
        self._engine = self._lent.engine

    async def ask(self, messages: tuple[Message, ...], sampling: Sampling, seed: int) -> Completion:
        """Ask the engine. Raises Reject for a prompt that it refuses, EngineError if it breaks."""
        assert self._engine is not None, "setup comes first"
        try:
            return await self._engine.generate(
                Request(messages=messages, sampling=sampling, seed=seed)
            )
        except RequestError as error:
            raise Reject(f"the engine refused the prompt: {error}") from error

    async def close(self) -> None:
        lent, self._engine, self._lent = self._lent, None, None
        if lent is not None:
            await lent.close()


def required(record: Mapping[str, Any], column: str) -> str:
    value = record.get(column)
    if not isinstance(value, str):
        raise Reject(f"there is no text in the column {column!r}; there are: {', '.join(record)}")
    return value


def reference_of(record: Mapping[str, Any]) -> str | None:
    value = record.get("reference_answer")
    return None if value is None else str(value)


def seed_for(run_seed: int, record: Mapping[str, Any], stage: str, round: int) -> int:
    """The seed of one sample; a record without id is known by its problem."""
    return seed_of(run_seed, str(record.get("id", record.get("problem"))), stage, round)


def spent(record: Mapping[str, Any], completion: Completion | None = None) -> dict[str, int]:
    """The tokens that were spent on a record, with those of ``completion``."""
    sums = record.get("tokens") or {"prompt": 0, "completion": 0}
    if completion is None:
        return dict(sums)
    return {
        "prompt": sums["prompt"] + completion.prompt_tokens,
        "completion": sums["completion"] + completion.completion_tokens,
    }
