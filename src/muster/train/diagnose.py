"""What goes wrong in a training, named with its numbers; and cutting the global batch anew while
training, after an out-of-memory or to balance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from muster.base.errors import MusterError
from muster.gang.beacon import BEACON
from muster.gang.stall import name_ranks
from muster.rank.checkpoint_files import find_steps
from muster.rank.life import NonFinite
from muster.rank.meter import memory_sentence, remember_micro_batch
from muster.train.feed import Window
from muster.train.rehearsal import rehearse
from muster.train.setup import Training

_BIGGER = "use --strategy fsdp on more GPUs, --precision bf16, a smaller model or shorter samples."


def loss_not_finite(run: Training, attempt: int, loss: float, *, is_own: bool) -> NonFinite:
    """The error for a loss that stopped being a number in ``attempt``, with the first cause; all
    ranks must ask for it together. ``is_own``: this rank's part of it is no number.
    """
    return NonFinite(
        f"The loss became {loss} in step {attempt + 1} (epoch {run.progress.epoch + 1})"
        f"{_on_ranks(run, is_own)}. "
        f"{_first_bad(run.work.replica.bare)} {_what_is_kept(run)}",
        hint=_REMEDIES,
    )


def weight_not_a_count(run: Training, weight: float, own: float) -> NonFinite:
    """The error for a sum of weights that counts nothing; all ranks must ask for it together."""
    return NonFinite(
        f"The weights of the loss add up to {weight:g} in step {run.progress.attempts + 1} (epoch "
        f"{run.progress.epoch + 1}){_on_ranks(run, not 0 <= own < math.inf)}: the gradient cannot "
        f"be divided by that. {_what_is_kept(run)}",
        hint="give muster.Loss the number of terms that its total is the sum of: 0 or more.",
    )


def parameters_not_finite(run: Training) -> NonFinite:
    """The error for parameters that a step has spoilt, while its loss was a number."""
    return NonFinite(
        f"Parameters are no longer finite after step {run.progress.step} (epoch "
        f"{run.progress.epoch + 1}), whose loss was {run.progress.last_loss}: a gradient was "
        f"not. {_first_bad(run.work.replica.bare)} {_what_is_kept(run)}",
        hint=_REMEDIES,
    )


def _on_ranks(run: Training, is_here: bool) -> str:
    """On which ranks something is, where it is not on all."""
    found = run.gang.council.gather(is_here)
    ranks = [rank for rank, is_there in enumerate(found) if is_there]
    return f" on {name_ranks(ranks)}" if 0 < len(ranks) < len(found) else ""


_REMEDIES = (
    "a lower --lr, a warm-up or --max-grad-norm helps most often; then look for a division, root "
    "or logarithm in the loss, and for such values in the data."
)


def _what_is_kept(run: Training) -> str:
    steps = find_steps(run.folder.checkpoints)
    if not steps:
        return "There is no checkpoint."
    return f"The checkpoint of step {steps[0]} is kept, and the same command goes on from it."


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
    """The error for a model that does not fit into memory with a batch of two samples."""
    memory = memory_sentence(device)
    return MusterError(
        f"The model and a batch of two samples do not fit into memory: "
        f"{str(error).splitlines()[0]}{'; ' + memory if memory else ''}.",
        hint=_BIGGER,
    )


def out_of_memory_error(run: Training, error: BaseException | None) -> MusterError:
    """The error for memory that does not hold even one sample."""
    memory = memory_sentence(run.gang.device)
    reason = str(error).splitlines()[0] if error is not None else "another rank ran out of memory"
    return MusterError(
        f"Not even one sample per rank fits into memory: {reason}. The model has "
        f"{run.num_parameters:,} parameters{'; ' + memory if memory else ''}.",
        hint=_BIGGER,
    )


_MEASURED_STEPS = 10


def shrink(run: Training, window: Window, shortage: BaseException | None) -> None:
    """Halve every rank's micro-batch, as one ran out of memory, and go back to the step's start.

    The global batch, the order of the samples and the learning rate stay what they were. Raises
    MusterError, on every rank, when not even one sample fits.
    """
    smaller = run.plan.halved()
    if smaller is None:
        raise out_of_memory_error(run, shortage)
    run.say(
        f"memory     ran out with micro-batches of {run.plan.micro_batch}; "
        f"going on with {smaller} (the same batches, the same losses)"
    )
    run.plan = smaller
    begin_again(run, window)
    if run.gang.is_first:
        remember_micro_batch(
            run.folder.memory_json, smaller.micro_batch, smaller.global_batch, smaller.num_ranks
        )


def begin_again(run: Training, window: Window) -> None:
    """Go back to the begin of a step that the ranks cannot end together, with the model wrapped
    anew.
    """
    BEACON.phase = "setup"
    run.work.forget_gradients()
    run.work.replica.renew()
    if run.gang.num_ranks > 1:
        rehearse(run.work, run.gang.council)
    run.feed.at(window.position, run.plan)


def rebalance(run: Training) -> None:
    """With ``--balance auto``, set the shares in proportion to measured speed after some steps."""
    if run.config.balance != "auto" or run.gang.num_ranks == 1 or run.is_balanced:
        return
    tally, step = run.meter.total, run.meter.step
    if tally.steps > 0:
        of_gpu_s = run.work.replica.compute_s()  # its steps all take as long as the slowest rank's
        own_s = step.seconds - step.communication_s - step.data_wait_s
        run.compute_s += own_s if of_gpu_s is None else of_gpu_s
    if tally.steps != _MEASURED_STEPS:
        return
    share = run.plan.shares[run.gang.rank]
    speeds = run.gang.council.gather(tally.samples * share / max(run.compute_s, 1e-9))
    run.is_balanced = True
    if max(speeds) < 1.1 * min(speeds):
        run.say("balance    all ranks are equally fast; even shares")
        return
    run.plan = run.plan.with_shares(speeds)
    shares = ", ".join(f"{share:.0%}" for share in run.plan.shares)
    run.say(f"balance    shares of the global batch by measured speed: {shares}")
    run.feed.at(run.progress.position, run.plan)
