"""One optimizer step: micro-batches, one synchronisation, one agreement, one update."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from muster.base.device_faults import is_out_of_memory
from muster.base.errors import TargetError
from muster.gang.beacon import BEACON
from muster.rank.meter import Meter, free_cached
from muster.rank.precision import Precision
from muster.rank.replica import Replica
from muster.rank.seeding import seed_all, seed_torch
from muster.rank.sync import restored
from muster.train.feed import Batch, Feed, Window
from muster.train.progress import Arriving
from muster.train.task import Loss, Task

_SKIPS = (
    "the loss before the first step used it. Write skips_parameters = True in the class of the "
    "task: torch then looks for unused parameters at every step."
)


class Sums(NamedTuple):
    """The results of one rank's micro-batches. ``loss`` and ``weight`` are sums."""

    loss: Tensor | float
    weight: float
    shortage: BaseException | None = None


@dataclass(kw_only=True)
class Work:
    """What a step needs; made once. ``example``: a small batch for ranks that have none."""

    task: Task
    replica: Replica
    optimizer: Optimizer
    precision: Precision
    scaler: torch.amp.GradScaler | None
    example: Batch
    _scale: float = 1.0
    _scales: dict[Any, Tensor] = field(default_factory=dict)
    _others: list[nn.Parameter] = field(init=False)

    def __post_init__(self) -> None:
        groups = self.optimizer.param_groups
        known = {id(parameter) for group in groups for parameter in group["params"]}
        self._others = [each for each in self.replica.parameters if id(each) not in known]

    def scale_by(self, scale: float) -> None:
        """Set the factor of each term of the loss in ``backward``."""
        if scale != self._scale:
            self._scale = scale
            self._scales.clear()

    def forget_gradients(self) -> None:
        """Clear all gradients, also of parameters that the optimizer does not have: theirs would
        be added to from step to step, and the norm that is clipped would grow with them.

        This is ``zero_grad`` without the profiler's mark, which takes longer than the rest of it.
        An optimizer that has a ``zero_grad`` of its own is asked.
        """
        if getattr(self.optimizer.zero_grad, "__func__", None) is not Optimizer.zero_grad:
            self.optimizer.zero_grad(set_to_none=True)
        else:
            for group in self.optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
        for parameter in self._others:
            parameter.grad = None

    def backward(self, losses: Tensor) -> None:
        """Add the gradients of scale x sum of ``losses`` to those that are there.

        The scale enters as the gradient of the losses, which saves the two operations (and their
        backwards) that adding and multiplying would take.
        """
        key = (losses.shape, losses.dtype)
        scale = self._scales.get(key)
        if scale is None:
            scale = torch.full(losses.shape, self._scale, dtype=losses.dtype, device=losses.device)
            self._scales[key] = scale
        if self.scaler is not None:
            scale = self.scaler.scale(scale)
        BEACON.phase = "backward"
        losses.backward(scale)  # type: ignore[no-untyped-call]


#: Is told this rank's sum of losses and of their weights, where they are known early.
Tell = Callable[[Tensor | float, float], None]


def accumulate(
    work: Work, feed: Feed, window: Window, meter: Meter, seed: int = 0, tell: Tell | None = None
) -> Sums:
    """Run forward and backward of every micro-batch; gradients are synchronised in the last one.

    The gradient is that of (sum of losses) / (planned samples of the global batch), added over
    the ranks. When memory runs out, this rank still takes part in the collectives that the
    others wait in, and says so in ``shortage``. What a forward draws follows from ``seed``, the
    same on no two ranks or steps, and the number of its round. ``tell`` is called while the last
    gradients travel, or not at all.
    """
    work.forget_gradients()
    work.replica.begin_window()
    try:
        return _all_rounds(work, feed, window, meter, seed, tell)
    except Exception as error:
        if not is_out_of_memory(error) or not work.replica.can_recover:
            raise
        shortage: BaseException = error.with_traceback(None)
    # Outside the handler: the failed graph's tensors are free by now.
    work.forget_gradients()
    free_cached(work.replica.gang.device)
    work.replica.release_others()
    return Sums(0.0, 0.0, shortage)


def _all_rounds(
    work: Work, feed: Feed, window: Window, meter: Meter, seed: int, tell: Tell | None
) -> Sums:
    total: Tensor | None = None
    weight: Tensor | float = 0.0
    arriving: Arriving | None = None
    scale = 1.0 / window.planned
    step, device = meter.step, work.replica.gang.device
    for index in range(window.rounds):
        BEACON.phase = "data"
        began = time.perf_counter()
        batch = feed.take()
        # After the batch: fetching may have drawn, and has done so for later batches as well.
        (seed_all if feed.draws_here else seed_torch)(seed + index, device)
        step.data_wait_s += time.perf_counter() - began
        is_last = index == window.rounds - 1
        if batch.size == 0:
            told = partial(_tell, tell, total, Arriving(weight)) if is_last else None
            _stand_in(work, told, is_last=is_last)
            continue
        BEACON.phase = "forward"
        with work.replica.synchronised(is_last):
            with work.precision.autocast():
                losses = work.task.loss(work.replica.wrapped, batch.data)
                losses, terms = check_loss(losses, batch.size, work.task)
            weight = weight + terms
            part = losses.detach().sum()
            total = part if total is None else total + part
            if is_last:  # before the backward, which the host then need not wait for
                arriving = Arriving(weight)
                work.replica.at_last_gradients(partial(_tell, tell, total, arriving))
            work.scale_by(scale)  # here: a round without a sample has set it to 0
            work.backward(losses)
    work.replica.check_complete(None if work.replica.trains_others else _SKIPS)
    started = work.replica.communication_started_s()
    if started is not None:
        step.communication_s += max(0.0, time.perf_counter() - started)
    terms_here = (arriving or Arriving(weight)).get()  # the one wait for a GPU, if at all
    return Sums(0.0 if total is None else total, terms_here)


def _tell(tell: Tell | None, total: Tensor | None, weight: Arriving) -> None:
    if tell is not None:
        tell(0.0 if total is None else total, weight.get())


def _stand_in(work: Work, told: Callable[[], None] | None, *, is_last: bool) -> None:
    """Take part in the others' collectives with a batch of weight 0, for want of own samples.
    ``told``: to be called with the last gradients.
    """
    replica = work.replica
    meets = is_last or replica.is_sharded or replica.meets_in_forward
    if replica.gang.num_ranks == 1 or not meets:
        return
    with restored(work.replica.bare), work.replica.synchronised(is_last):
        with work.precision.autocast():
            losses = work.task.loss(work.replica.wrapped, work.example.data)
            losses, _ = check_loss(losses, work.example.size, work.task)
        if told is not None:
            replica.at_last_gradients(told)
        work.scale_by(0.0)
        work.backward(losses)


def check_loss(loss: Any, count: int, task: Task) -> tuple[Tensor, Tensor | float]:
    """A task's loss as terms to add up, scalar or [n], and the number of terms they stand for.

    A number of terms that is a tensor stays where it is, as float64: sums of it are Python's.
    Raises TargetError where it is neither of the two forms, or nothing can be learnt from it.
    """
    if isinstance(loss, Loss):
        weight, loss = loss.weight, loss.total
        if isinstance(loss, Tensor) and loss.dim() == 0:
            _check_depends(loss, task)
            if isinstance(weight, Tensor):
                return loss, weight.detach().to(torch.float64).reshape(())
            return loss, float(weight)
    elif isinstance(loss, Tensor) and loss.shape == (count,):
        _check_depends(loss, task)
        return loss, float(count)
    shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
    raise TargetError(
        f"{type(task).__name__}.loss gave {shape} for a batch of {count} samples; a mean cannot "
        "be weighted correctly over uneven batches.",
        hint=f"give one loss per sample, shape ({count},), as with reduction='none'; or "
        "muster.Loss(total, weight) for a sum over something else, such as tokens.",
    )


def _check_depends(losses: Tensor, task: Task) -> None:
    if not losses.requires_grad:
        raise TargetError(
            f"{type(task).__name__}.loss does not depend on any parameter that can be trained.",
            hint="are all parameters frozen, or is the loss detached or computed under no_grad?",
        )


def update(work: Work, correction: float, max_grad_norm: float | None) -> tuple[Any, bool]:
    """Apply the synchronised gradient once; returns its norm (if clipped) and whether it was used.

    ``correction``: what the gradient is multiplied by, where the terms of the loss were not the
    planned number of samples. With fp16 a gradient that overflowed on any rank is in the sum on
    all of them, so all skip the step together.
    """
    scaler, replica = work.scaler, work.replica
    if scaler is not None:
        scaler.unscale_(work.optimizer)
    if correction != 1.0:
        gradients = [p.grad for p in replica.parameters if p.grad is not None]
        torch._foreach_mul_(gradients, correction)
    norm = replica.clip(max_grad_norm) if max_grad_norm is not None else None
    if scaler is None:
        work.optimizer.step()
        return norm, True
    before = scaler.get_scale()
    scaler.step(work.optimizer)
    scaler.update()
    return norm, scaler.get_scale() >= before
