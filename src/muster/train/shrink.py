"""Changing how the global batch is cut while training: after an out-of-memory, or to balance."""

from __future__ import annotations

from muster.gang.beacon import BEACON
from muster.rank.meter import remember_micro_batch
from muster.train.diagnose import out_of_memory_error
from muster.train.feed import Window
from muster.train.rehearsal import rehearse
from muster.train.setup import Training

_MEASURED_STEPS = 10


def shrink(run: Training, window: Window, shortage: BaseException | None) -> None:
    """Some rank ran out of memory: all halve the micro-batch and go back to the step's start.

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
    BEACON.phase = "setup"
    run.plan = smaller
    run.work.optimizer.zero_grad(set_to_none=True)
    run.work.replica.renew()
    if run.gang.num_ranks > 1:
        rehearse(run.work, run.gang.council)
    run.feed.at(window.position, smaller)
    if run.gang.is_first:
        remember_micro_batch(
            run.folder.memory_json, smaller.micro_batch, smaller.global_batch, smaller.num_ranks
        )


def rebalance(run: Training) -> None:
    """With ``--balance auto``: after some steps, shares in proportion to measured speed."""
    if run.config.balance != "auto" or run.gang.num_ranks == 1 or run.is_balanced:
        return
    if run.meter.total.steps > 0:
        run.compute_s += run.work.replica.compute_s() or 0.0
    if run.meter.total.steps != _MEASURED_STEPS:
        return
    tally = run.meter.total
    busy_s = tally.seconds - tally.communication_s - tally.data_wait_s
    if run.compute_s:  # of a GPU, whose steps all take as long as the slowest rank's
        busy_s = run.compute_s
    share = run.plan.shares[run.gang.rank]
    speeds = run.gang.council.gather(tally.samples * share / max(busy_s, 1e-9))
    run.is_balanced = True
    if max(speeds) < 1.1 * min(speeds):
        run.say("balance    all ranks are equally fast; even shares")
        return
    run.plan = run.plan.with_shares(speeds)
    shares = ", ".join(f"{share:.0%}" for share in run.plan.shares)
    run.say(f"balance    shares of the global batch by measured speed: {shares}")
    run.feed.at(run.progress.position, run.plan)
