"""Naming what went wrong in the training of an agent, on every rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from muster.base.errors import EXIT_SOME_FAILED, MusterError
from muster.rank.meter import memory_sentence

if TYPE_CHECKING:
    import torch

    from muster.rl.config import PpoConfig
    from muster.rl.setup import AgentRun


class NonFinite(MusterError):
    """A loss, a gradient, a reward, an observation or a value is infinite or not a number."""

    exit_code = EXIT_SOME_FAILED


def end_for_nan(run: AgentRun, what: str, look: str) -> NoReturn:
    """Raise NonFinite, after the last good checkpoint is whole on all ranks, which come here
    together. ``what`` is no number; ``look``: what helps, after a lower learning rate."""
    run.checkpoints.wait()
    run.gang.council.meet()
    raise NonFinite(
        f"{what} is no longer a number in update {run.progress.updates + 1}, after step "
        f"{run.progress.steps:,}.",
        hint=f"a lower --lr helps most often; then {look}. The same command goes on from the last "
        "checkpoint.",
    )


def no_room_error(config: PpoConfig, device: torch.device, error: BaseException) -> MusterError:
    """The error for memory that ran out, with the settings that take it."""
    free = memory_sentence(device)
    return MusterError(
        f"Memory ran out with {config.num_envs} environments x {config.rollout_steps} steps per "
        f"rank and minibatches of {config.batch_size} sequences ({str(error).splitlines()[0]})."
        + (f" {free}." if free else ""),
        hint="a larger --grad-accum-steps or a smaller --batch-size takes less in learning; fewer "
        "--num-envs or --rollout-steps in collecting.",
    )
