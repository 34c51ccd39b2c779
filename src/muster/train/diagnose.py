"""Naming what went wrong in a training, with the numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from muster.base.errors import EXIT_SOME_FAILED, MusterError
from muster.rank.checkpoint_files import find_steps
from muster.rank.meter import memory_sentence

if TYPE_CHECKING:
    from muster.train.setup import Training


_BIGGER = "use --strategy fsdp on more GPUs, --precision bf16, a smaller model or shorter samples."


class NonFinite(MusterError):
    """The loss or a parameter is infinite or not a number."""

    exit_code = EXIT_SOME_FAILED

    @staticmethod
    def at(run: Training, attempt: int, loss: float) -> NonFinite:
        """The error for a loss that stopped being a number in ``attempt``, with the first cause."""
        return NonFinite(
            f"The loss became {loss} in step {attempt + 1} (epoch {run.progress.epoch + 1}). "
            f"{_first_bad(run.work.replica.bare)} {_what_is_kept(run)}",
            hint=_REMEDIES,
        )

    @staticmethod
    def after(run: Training) -> NonFinite:
        """The error for parameters that a step has spoilt, while its loss was a number."""
        return NonFinite(
            f"Parameters are no longer finite after step {run.progress.step} (epoch "
            f"{run.progress.epoch + 1}), whose loss was {run.progress.last_loss}: a gradient was "
            f"not. {_first_bad(run.work.replica.bare)} {_what_is_kept(run)}",
            hint=_REMEDIES,
        )


_REMEDIES = (
    "a lower --lr, a warm-up or --max-grad-norm helps most often; then look for a division, root "
    "or logarithm in the loss, and for such values in the data. The same command goes on from the "
    "checkpoint."
)


def _what_is_kept(run: Training) -> str:
    steps = find_steps(run.folder.checkpoints)
    return f"The checkpoint of step {steps[0]} is kept." if steps else "There is no checkpoint."


def are_finite(parameters: Sequence[Tensor]) -> bool:
    """Whether this rank's part of ``parameters`` has no infinity and no NaN."""
    parts = [p.to_local() if isinstance(p, DTensor) else p for p in parameters]
    parts = [part.detach() for part in parts if part.numel()]
    if not parts:
        return True
    largest = torch._foreach_norm(parts, torch.inf)
    return all(math.isfinite(value) for value in torch.stack(largest).tolist())


def _first_bad(model: torch.nn.Module) -> str:
    for name, parameter in model.named_parameters():
        if not bool(torch.isfinite(parameter.detach()).all()):
            return f"The first parameter that is not finite is {name}."
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not bool(torch.isfinite(parameter.grad).all()):
            return f"All parameters are finite; the first gradient that is not is {name}'s."
    return "All parameters and gradients are finite: the loss itself, or the data, is not."


def no_room_error(device: torch.device, error: BaseException) -> MusterError:
    """The model itself, or two samples through it, do not fit."""
    memory = memory_sentence(device)
    return MusterError(
        f"The model and a batch of two samples do not fit into memory: "
        f"{str(error).splitlines()[0]}{'; ' + memory if memory else ''}.",
        hint=_BIGGER,
    )


def out_of_memory_error(run: Training, error: BaseException | None) -> MusterError:
    """Not even one sample fits."""
    memory = memory_sentence(run.gang.device)
    reason = str(error).splitlines()[0] if error is not None else "another rank ran out of memory"
    return MusterError(
        f"Not even one sample per rank fits into memory: {reason}. The model has "
        f"{run.num_parameters:,} parameters{'; ' + memory if memory else ''}.",
        hint=_BIGGER,
    )
