"""The rehearsal before the first step: a few samples go through all that a task does, to its end.

It leaves no trace. A mistake in a task shows here with names, instead of after hours, as a hang or
as a silent drift.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import Dataset

from muster.base.codec import check_storable
from muster.base.errors import MusterError, NotTried, TargetError
from muster.rank.alike import check_identical
from muster.rank.meter import count_flops, kept_bytes
from muster.rank.precision import Precision
from muster.rank.process_group import Council, Gang
from muster.rank.replica import Replica
from muster.rank.seeding import Untouched
from muster.rank.sync import restored
from muster.rank.task import name_of, raise_together, rehearsing, tried
from muster.train.evaluation import Evaluator, monitored
from muster.train.feed import Batch, Collate, to_device
from muster.train.step import Work, check_loss
from muster.train.task import Task

_LOOK_AT = 64
_FEW = 8


def find_example(
    dataset: Dataset[Any],
    num_samples: int,
    collate: Collate,
    rank: int,
    device: torch.device,
    size: int = 2,
) -> Batch:
    """A batch of ``size`` samples, or fewer if there are no more; every rank gets others."""
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


class Gradients(NamedTuple):
    """Names of parameters that a loss does not depend on, and whose gradients are sparse."""

    unused: list[str]
    sparse: list[str]


def find_gradients(task: Task, model: nn.Module, example: Batch, precision: Precision) -> Gradients:
    """Look at the gradients of ``example``. Leaves no trace."""
    found = Gradients([], [])
    with _traceless(model):
        _forward_backward(task, model, example, precision)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and parameter.grad is None:
                found.unused.append(name)
            elif parameter.grad is not None and parameter.grad.layout is not torch.strided:
                found.sparse.append(name)
    return found


def sparse_refused(task: Task, sparse: list[str], num_ranks: int) -> TargetError | None:
    """Why gradients of these cannot be added up over the ranks, if there are any."""
    if num_ranks == 1 or not sparse:
        return None
    return TargetError(
        f"{type(task).__name__}.loss gives sparse gradients to {', '.join(sparse)}, which are not "
        f"added up over {num_ranks} ranks.",
        hint="make the layer with sparse=False, or train on one device.",
    )


def find_flops(task: Task, model: nn.Module, example: Batch, precision: Precision) -> float | None:
    """Floating-point operations of forward and backward per sample of ``example``. Leaves no trace.

    None where they cannot be counted.
    """
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
    with Untouched(), restored(model):
        model.train()
        yield
        model.zero_grad(set_to_none=True)


def _forward_backward(task: Task, model: nn.Module, example: Batch, precision: Precision) -> None:
    with precision.autocast():
        losses, _ = check_loss(task.loss(model, example.data), example.size, task)
    losses.sum().backward()  # type: ignore[no-untyped-call]


def rehearse(work: Work, council: Council) -> None:
    """Run synchronised forwards and backwards of the example, each time the model is wrapped.

    Two of them, because DistributedDataParallel lays out its buckets anew after the first.
    Raises MusterError when gradients were not synchronised, because the loss does not call the
    wrapper.
    """
    replica = work.replica
    for _ in range(2):
        before = replica.num_collectives()
        with ExitStack() as stack:
            stack.enter_context(Untouched())
            stack.enter_context(restored(replica.bare))
            replica.wrapped.train()
            with replica.synchronised(True):
                with work.precision.autocast():
                    losses = work.task.loss(replica.wrapped, work.example.data)
                    losses, _ = check_loss(losses, work.example.size, work.task)
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


def rehearse_end(
    work: Work, evaluators: Mapping[str, Evaluator], gang: Gang, say: Callable[[str], None]
) -> None:
    """Call once, on few samples, what is otherwise called after an epoch or at the end.

    That is ``score``, ``summarise``, the monitored metric, and ``finish`` with a copy of the model.

    Raises TargetError, on every rank, where one of them fails.
    """
    task, replica = work.task, work.replica
    open_: list[str] = []
    called = ["score", "summarise", "monitor"] if evaluators else []
    error: MusterError | None = None
    try:
        with rehearsing(task):
            judge = evaluators.get("val") or evaluators.get("test")
            for evaluator in evaluators.values():
                try:
                    with _not_compiled(replica.bare):
                        metrics = evaluator.rehearse(replica.evaluated, _FEW)
                    check_storable(name_of(task.summarise), metrics)
                    if evaluator is judge:
                        monitored(metrics, task)
                except NotTried as reason:
                    open_.append(str(reason))
            if type(task).finish is not Task.finish:
                called.append("finish")
                if gang.is_first:
                    try:
                        _rehearse_finish(task, replica)
                    except NotTried as reason:
                        open_.append(str(reason))
    except MusterError as found:
        error = found
    raise_together(gang.council, error)
    for sentence in dict.fromkeys(open_):
        say(f"note       {sentence}; it is called on all samples later")
    if called and not open_:
        say(f"rehearsal  {', '.join(called)} called once, on at most {_FEW} samples")


def _rehearse_finish(task: Task, replica: Replica) -> None:
    with TemporaryDirectory(prefix="muster-rehearsal-") as folder, tried(task.finish):
        if replica.is_sharded:
            model = task.model()
        else:
            try:
                model = _copy_on_cpu(replica.bare)
            except Exception as error:
                raise NotTried(
                    f"{type(task).__name__}.finish could not be rehearsed: the model cannot be "
                    f"copied ({error})"
                ) from None
        task.finish(model.eval(), folder)


def _copy_on_cpu(model: nn.Module) -> nn.Module:
    """A copy that takes no memory of the GPU: its tensors are copied to the CPU first."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        copied = parameter.detach().to("cpu", copy=True)
        memo[id(parameter)] = nn.Parameter(copied, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.detach().to("cpu", copy=True)
    return copy.deepcopy(model, memo)


@contextmanager
def _not_compiled(model: nn.Module) -> Iterator[None]:
    """Switch torch.compile off inside: it would specialise on the few samples."""
    compiled = model._compiled_call_impl
    model._compiled_call_impl = None
    try:
        yield
    finally:
        model._compiled_call_impl = compiled
