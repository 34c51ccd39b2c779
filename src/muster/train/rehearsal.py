"""Before the first step: one tiny batch through everything, leaving no trace.

What is wrong with a task shows here with names, instead of as a hang or a silent drift later.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from muster.base.errors import MusterError, TargetError
from muster.gang.agreement import Council
from muster.gang.flops import count_flops, kept_bytes
from muster.gang.precision import Precision
from muster.gang.seeding import Untouched
from muster.gang.sync import check_identical, restored
from muster.train.feed import Batch, Collate, to_device
from muster.train.step import Work, check_loss
from muster.train.task import Task

_LOOK_AT = 64


def find_example(
    dataset: Dataset[Any],
    num_samples: int,
    collate: Collate,
    rank: int,
    device: torch.device,
    size: int = 2,
) -> Batch:
    """A batch of ``size`` samples (fewer, if there are no more), others on every rank."""
    found: list[Any] = []
    with Untouched():
        for offset in range(min(num_samples, _LOOK_AT)):
            sample = dataset[(2 * rank + offset) % num_samples]
            if sample is not None:
                found.append(sample)
            if len(found) == size:
                break
    if not found:
        raise TargetError(
            f"The first {min(num_samples, _LOOK_AT)} items of the training data are all None.",
            hint="leave out what is not wanted in the data set itself.",
        )
    return Batch(to_device(collate(found), device), len(found))


def find_unused(task: Task, model: nn.Module, example: Batch, precision: Precision) -> list[str]:
    """Names of parameters that the loss of ``example`` does not depend on. Leaves no trace."""
    with _traceless(model):
        _forward_backward(task, model, example, precision)
        return [
            name
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and parameter.grad is None
        ]


def find_flops(task: Task, model: nn.Module, example: Batch, precision: Precision) -> float | None:
    """Floating-point operations of forward and backward per sample of ``example``, where they can
    be counted. Leaves no trace."""
    with _traceless(model):
        run = partial(_forward_backward, task, model, example, precision)
        total = count_flops(model, run)
    return None if total is None else total / example.size


def find_kept(task: Task, model: nn.Module, few: Batch, more: Batch, precision: Precision) -> float:
    """Bytes that one more sample keeps for the backward. Leaves no trace."""
    found = []
    for batch in (few, more):
        with _traceless(model), kept_bytes(model) as sizes:
            with precision.autocast():
                losses, _ = check_loss(task.loss(model, batch.data), batch.size, task)
            found.append(sum(sizes))
            del losses
    return max(0.0, (found[1] - found[0]) / (more.size - few.size))


@contextmanager
def _traceless(model: nn.Module) -> Iterator[None]:
    with Untouched(), restored(model.buffers()):
        model.train()
        yield
        model.zero_grad(set_to_none=True)


def _forward_backward(task: Task, model: nn.Module, example: Batch, precision: Precision) -> None:
    with precision.autocast():
        losses, _ = check_loss(task.loss(model, example.data), example.size, task)
    _check_depends(task, losses)
    losses.sum().backward()  # type: ignore[no-untyped-call]


def _check_depends(task: Task, losses: torch.Tensor) -> None:
    if not losses.requires_grad:
        raise TargetError(
            f"{type(task).__name__}.loss does not depend on any parameter that can be trained.",
            hint="are all parameters frozen, or is the loss computed under no_grad?",
        )


def rehearse(work: Work, council: Council) -> None:
    """Synchronised forwards and backwards of the example, after wrapping or wrapping again.

    Two of them, because DistributedDataParallel lays out its buckets anew after the first.
    Raises MusterError when gradients were not synchronised: the wrapper was gone around.
    """
    replica = work.replica
    for _ in range(2):
        before = replica.num_collectives()
        with ExitStack() as stack:
            stack.enter_context(Untouched())
            stack.enter_context(restored(replica.buffers))
            replica.wrapped.train()
            with replica.synchronised(True):
                with work.precision.autocast():
                    losses = work.task.loss(replica.wrapped, work.example.data)
                    losses, _ = check_loss(losses, work.example.size, work.task)
                _check_depends(work.task, losses)
                work.scale_by(1.0)
                work.backward(losses)
            went_around = before is not None and replica.num_collectives() == before
            if council.any(went_around):
                raise MusterError(
                    f"{type(work.task).__name__}.loss does not call the model that it is given, "
                    "so gradients were not synchronised: every rank would train a model of its "
                    "own.",
                    hint="call the `model` argument itself, as in model(x); not a module kept in "
                    "the task, and not something inside the model.",
                )
            if not replica.is_sharded:
                named = replica.bare.named_parameters()
                gradients = {name: p.grad for name, p in named if p.grad is not None}
                check_identical(gradients, council, "after a synchronised backward (gradients)")
            replica.wrapped.zero_grad(set_to_none=True)
