"""The training loop, from top to bottom."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from muster.gang.beacon import BEACON
from muster.rank.checkpoint import Snapshot
from muster.rank.checkpoint_files import model_tensors, optimizer_scalars, optimizer_tensors
from muster.rank.life import Ending, Interval, StopFlag
from muster.rank.seeding import STEP, get_generators, mix
from muster.rank.sync import check_identical
from muster.train.diagnose import NonFinite, are_finite
from muster.train.losses import LossTrail, StepLoss
from muster.train.reporting import Reporter
from muster.train.schedules import factor_at
from muster.train.setup import Training
from muster.train.shrink import rebalance, shrink
from muster.train.step import Sums, accumulate, update


def fit(run: Training, stop: StopFlag, reporter: Reporter, interval: Interval) -> Ending:
    """Train until the end, or until any rank is asked to stop; every rank returns the same.

    Raises NonFinite when the loss is no longer a number; the last good checkpoint is kept then.
    """
    work, progress, limits, council = run.work, run.progress, run.limits, run.gang.council
    rank, seed = run.gang.rank, run.config.seed
    meter, trail = run.meter, LossTrail(run.gang.device)
    work.replica.wrapped.train()
    reporter.begin(run)

    while (over := limits.is_over(progress)) is None:
        meter.begin_step()
        BEACON.step = progress.step
        lr_factor = _set_lr(run)
        window = run.feed.window()
        sums = accumulate(work, run.feed, window, meter, mix(seed, STEP, progress.attempts, rank))
        verdict = _agree(run, sums, trail, wants_stop=stop.is_set, wants_save=interval.is_due())
        _check_finite(run, verdict.losses)
        if verdict.shortage:
            trail.drop()
            reporter.losses(run, verdict.losses)
            shrink(run, window, sums.shortage)  # and the same step again
            continue

        BEACON.phase = "optimizer"
        norm, used = (None, False)
        if verdict.weight > 0:
            correction = window.planned / verdict.weight
            norm, used = update(work, correction, run.config.max_grad_norm)
        progress.advance(run.feed.order.after(window.position, window.planned), window.planned,
                         applied=used)  # fmt: skip
        if progress.attempts == 1 and not work.replica.is_sharded:
            check_identical(dict(work.replica.bare.named_parameters()), council, "after step 1")
            run.checkpoints.prepare(_tensors(run))
        meter.end_step(window.planned)
        reporter.step(run, verdict.losses, lr_factor, norm, was_used=used)
        rebalance(run)

        is_best = False
        if limits.wants_evaluation(progress):
            BEACON.phase = "evaluation"
            _flush(run, trail, reporter)
            is_best = reporter.evaluate(run)
        if is_best or verdict.save or verdict.stop or interval.is_due_at(progress.step):
            _flush(run, trail, reporter)
            reporter.flush()
            meter.add_checkpoint(_save(run, is_best=is_best))
            interval.done()
        if verdict.stop:
            run.checkpoints.wait()
            return Ending("requeue", f"asked to stop ({stop.name or 'on another rank'})")

    _flush(run, trail, reporter)
    _save(run, is_best=False)
    run.checkpoints.wait()
    council.meet()
    return Ending("finished", over)


Losses = Sequence[StepLoss]


class _Verdict(NamedTuple):
    """What the ranks have agreed on in a step. ``losses``: of the attempts now known."""

    weight: float
    losses: Losses
    shortage: bool
    stop: bool
    save: bool


def _agree(
    run: Training, sums: Sums, trail: LossTrail, *, wants_stop: bool, wants_save: bool
) -> _Verdict:
    """One small sum over the ranks per step. Nobody acts on what only it knows."""
    is_short = sums.shortage is not None
    known = trail.push(run.progress.attempts, run.progress.epoch, sums.loss, sums.weight)
    values = (
        sums.weight,
        known.total if known else 0.0,
        known.weight if known else 0.0,
        float(is_short),
        float(wants_stop),
        float(wants_save),
    )
    weight, total, terms, short, stop, save = run.gang.council.add(values).wait()
    is_known = known is not None and terms > 0 and not (short and trail.lag == 0)
    losses = [known._replace(total=total, weight=terms)] if known is not None and is_known else []
    return _Verdict(weight, losses, short > 0, stop > 0, save > 0)


def _flush(run: Training, trail: LossTrail, reporter: Reporter) -> None:
    """Take in the losses still on their way from a GPU, before anything depends on them."""
    rest = trail.flush()  # as many on every rank
    if not rest:
        return
    sums = run.gang.council.add([v for known in rest for v in (known.total, known.weight)]).wait()
    losses = [
        known._replace(total=total, weight=terms)
        for known, total, terms in zip(rest, sums[::2], sums[1::2], strict=True)
        if terms > 0
    ]
    _check_finite(run, losses)
    reporter.losses(run, losses)


def _check_finite(run: Training, losses: Losses) -> None:
    for loss in losses:
        if not math.isfinite(loss.mean):
            _finish_writing(run)
            raise NonFinite.at(run, loss.attempt, loss.mean)
        run.progress.add_loss(loss)


def _finish_writing(run: Training) -> None:
    """Let the last good checkpoint become whole, so that every rank can name it."""
    run.checkpoints.wait()
    run.gang.council.meet()


def _set_lr(run: Training) -> float:
    lr = run.contract.lr
    factor = factor_at(
        run.progress.step,
        schedule=run.config.schedule,
        warmup_steps=run.warmup_steps,
        total_steps=run.limits.total_steps,
        floor=min(1.0, run.config.min_lr / lr),
    )
    for group in run.work.optimizer.param_groups:
        group["lr"] = group["initial_lr"] * factor
    return factor


def _tensors(run: Training) -> dict[str, Any]:
    replica = run.work.replica
    return {
        **model_tensors(replica.bare),
        **optimizer_tensors(replica.bare, run.work.optimizer),
    }


def _save(run: Training, *, is_best: bool) -> float:
    """Save the state as it is now; returns the seconds the step has waited for it."""
    began = time.perf_counter()
    BEACON.phase = "checkpoint"
    replica, council, optimizer = run.work.replica, run.gang.council, run.work.optimizer
    replica.settle()
    if council.any(not are_finite(replica.parameters)):
        _finish_writing(run)
        raise NonFinite.after(run)
    if not replica.is_sharded:
        named = dict(replica.bare.named_parameters())
        check_identical(named, council, f"at the checkpoint of step {run.progress.step}")
    extra = {
        "progress": run.progress.to_record(),
        "contract": run.contract,
        "code": run.code,
        "plan": {"micro_batch": run.plan.micro_batch, "shares": run.plan.shares},
        "scaler": run.work.scaler.state_dict() if run.work.scaler is not None else None,
        "optimizer_scalars": optimizer_scalars(replica.bare, optimizer),
        "param_groups": [{"initial_lr": g["initial_lr"]} for g in optimizer.param_groups],
        "generators": council.gather(get_generators()),
        "num_ranks": run.gang.num_ranks,
    }
    run.checkpoints.save(
        Snapshot(
            step=run.progress.step,
            tensors=_tensors(run),
            extra=extra,
            best=run.progress.best if is_best else None,
        )
    )
    return time.perf_counter() - began
