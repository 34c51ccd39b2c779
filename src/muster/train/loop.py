"""Training a model: one step from top to bottom, and what is saved of it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from muster.base.errors import MusterError, TargetError
from muster.base.freed_blocks import keep_freed_blocks
from muster.gang.beacon import BEACON
from muster.rank.alike import check_alike, check_same_model
from muster.rank.life import (
    Decision,
    Interval,
    Results,
    StartAgain,
    Status,
    StopFlag,
    Trainable,
    Trainer,
    be_rank,
    live,
    memory_explained,
)
from muster.rank.meter import remember_micro_batch
from muster.rank.process_group import Pending
from muster.rank.record import Reporter
from muster.rank.seeding import STEP, get_generators, mix
from muster.rank.state import Start
from muster.train.config import TrainConfig
from muster.train.diagnose import (
    are_finite,
    begin_again,
    loss_not_finite,
    no_room_error,
    out_of_memory_error,
    parameters_not_finite,
    rebalance,
    shrink,
    weight_not_a_count,
)
from muster.train.evaluation import monitored
from muster.train.progress import LossTrail, StepLoss, factor_at
from muster.train.reporting import StepLines, headlines, opening, picture, sum_up, words
from muster.train.setup import Training, prepare
from muster.train.step import Sums, accumulate, update
from muster.train.task import Task, make_task

#: Of what a step frees, for the next one: as much as glibc keeps by itself of larger models.
_KEPT_BYTES = 31 << 20


class ModelTrainer(Trainer):
    """Trains a model on data: one optimizer step after the other.

    ``step`` raises NonFinite when the loss is no longer a number; the last good checkpoint is kept
    then.
    """

    def __init__(self, run: Training) -> None:
        self.run = run
        self.gang = run.gang
        self.state = run.state
        self._reporter = Reporter(
            run.gang, run.folder, run.progress.step, run.say,
            with_tensorboard=run.config.tensorboard,
        )  # fmt: skip
        self._lines = StepLines(self._reporter.record)
        self._trail = LossTrail(run.gang.device)
        self._picture, self._words = partial(picture, run), partial(words, run)

    def begin(self) -> None:
        self.run.work.replica.wrapped.train()
        self._reporter.begin(opening(self.run), self.run.fraction)

    def status(self) -> Status:
        limits, progress = self.run.limits, self.run.progress
        over = limits.is_over(progress)
        return Status(
            step=progress.step,
            updates=progress.step,
            total_steps=limits.total_steps,
            over=over,
            wants_evaluation=over is not None or limits.wants_evaluation(progress),
        )

    def step(self, stop: StopFlag, interval: Interval) -> Decision | None:
        run, trail, work = self.run, self._trail, self.run.work
        progress, meter = run.progress, run.meter
        meter.begin_step()
        BEACON.step = progress.step
        lr_factor = _set_lr(run)
        window = run.feed.window()
        seed = mix(run.config.seed, STEP, progress.attempts, run.gang.rank)
        agreement = _Agreement(run, trail, stop, interval)
        try:
            sums = accumulate(work, run.feed, window, meter, seed, agreement.begin)
        except TargetError as error:
            raise _named(error, run) from None
        verdict = agreement.end(sums)
        _check_finite(run, verdict.losses, own=[agreement.known])
        if not 0 <= verdict.weight < math.inf:
            _finish_writing(run)
            raise weight_not_a_count(run, verdict.weight, sums.weight)
        if verdict.changed:
            check_alike(work.replica.bare, run.gang.council, f"in step {progress.attempts + 1}")
            work.replica.take_buffers()
        if verdict.again:
            trail.drop()
            meter.pause()
            self._lines.write(verdict.losses)
            if verdict.shortage:
                shrink(run, window, sums.shortage)
            else:
                begin_again(run, window)
            return None
        BEACON.phase = "optimizer"
        norm, used = (None, False)
        if verdict.weight > 0:
            correction = window.planned / verdict.weight
            norm, used = update(work, correction, run.config.max_grad_norm)
        progress.advance(window.after, window.planned, applied=used)
        if progress.attempts == 1:
            run.state.check_kept()
            if not work.replica.is_sharded:
                check_same_model(work.replica.bare, run.gang.council, "after step 1")
                run.state.reserve()
        meter.end_step(window.planned)
        if used:
            self._lines.add(run, lr_factor, norm)
        self._lines.write(verdict.losses)
        self._reporter.show(run.fraction, self._picture, self._words)
        rebalance(run)
        return Decision(verdict.stop, verdict.save)

    def evaluate(self) -> bool:
        """Evaluate on the validation data, on every rank; True when it is the best so far."""
        self._settle()
        run, progress, replica = self.run, self.run.progress, self.run.work.replica
        run.meter.pause()
        evaluator = run.evaluators.get("val") or run.evaluators.get("test")
        if evaluator is None:
            return False
        began = time.perf_counter()
        replica.settle()
        metrics = evaluator(replica.evaluated, is_sharded=replica.is_sharded)
        # Rank 0's, should a task's summary differ between ranks: one decision for all.
        value = run.gang.council.share(monitored(metrics, run.work.task))
        is_best = progress.judge(value, higher_is_better=run.work.task.better == "higher")
        numbers = {k: v for k, v in metrics.items() if isinstance(v, int | float)}
        shown = "  ".join(f"{k} {v:.4f}" for k, v in numbers.items())
        if (loss := progress.epoch_loss) is not None:
            numbers = {"train_loss": loss, **numbers}
            shown = f"train loss {loss:.4f}  {shown}"
        line = {"step": progress.step, "epoch": progress.epoch, "samples": progress.samples}
        progress.evaluations.append({**line, **numbers})
        self._reporter.evaluated(
            {**line, **numbers, "seconds": time.perf_counter() - began},
            f"epoch {progress.epoch:>3}/{run.limits.epochs}  {shown}",
            is_best=is_best,
        )
        return is_best

    def save(self, *, is_best: bool, at_end: bool = False) -> None:
        self._settle()
        self._reporter.flush()
        if at_end:  # no step waits for it
            self.run.meter.pause()
            _save(self.run, is_best=is_best)
            return
        with self.run.meter.saving():
            _save(self.run, is_best=is_best)

    def _settle(self) -> None:
        """Wait until the GPU has finished its steps, as a part of them, and read their losses."""
        rest = self._trail.flush()  # as many on every rank
        if rest:
            sums = [number for known in rest for number in (known.total, known.weight)]
            sums = self.gang.council.add(sums).wait()
            losses = [
                known._replace(total=total, weight=terms)
                for known, total, terms in zip(rest, sums[::2], sums[1::2], strict=True)
                if terms > 0
            ]
            _check_finite(self.run, losses, own=rest)
            self._lines.write(losses)
        if self.gang.device.type == "cuda":
            torch.cuda.synchronize(self.gang.device)

    def sum_up(self, why: str) -> Results:
        return sum_up(self.run, why)

    def headlines(self, results: Results) -> Iterable[str]:
        return headlines(results)

    def explain(self, error: BaseException) -> MusterError:
        """The error for memory that ran out: `StartAgain`, unless the micro-batch is one sample.

        All ranks start again, with half the micro-batch, where they cannot recover together. So it
        is for a sharded model, whose collectives cannot be finished by a rank that has lost its
        activations. The launcher starts the gang again, from the last checkpoint.
        """
        run = self.run
        smaller = run.plan.halved()
        if smaller is None:
            return out_of_memory_error(run, error)
        remember_micro_batch(
            run.folder.memory_json, smaller.micro_batch, smaller.global_batch, smaller.num_ranks
        )
        return StartAgain(
            f"memory     ran out with micro-batches of {run.plan.micro_batch}; starting again with "
            f"{smaller} from the last checkpoint"
        )

    def close(self) -> None:
        self.run.feed.close()
        self._reporter.close()


Losses = Sequence[StepLoss]


class _Verdict(NamedTuple):
    """What the ranks have agreed on in a step.

    ``losses``: of the attempts now known; ``again``: the step has to be made again; ``changed``:
    some rank's model has other buffers, or trains other parameters, than before.
    """

    weight: float
    losses: Losses
    again: bool
    shortage: bool
    changed: bool
    stop: bool
    save: bool


class _Agreement:
    """One small sum over the ranks, at the end of a step: no rank acts on what it alone knows.

    It is begun while the last gradients travel, where all is known by then, so that a rank waits
    once for the others and not twice.
    """

    def __init__(self, run: Training, trail: LossTrail, stop: StopFlag, interval: Interval) -> None:
        self._run, self._trail, self._stop, self._interval = run, trail, stop, interval
        self.known: StepLoss | None = None  # of this rank alone
        self._pending: Pending | None = None

    def begin(self, loss: Tensor | float, weight: float, *, is_short: bool = False) -> None:
        progress, replica = self._run.progress, self._run.work.replica
        known = self._trail.push(progress.attempts, progress.epoch, loss, weight)
        values = (
            weight,
            known.total if known else 0.0,
            known.weight if known else 0.0,
            float(is_short),
            float(replica.trains_others),
            float(replica.has_other_buffers),
            float(self._stop.is_set),
            float(self._interval.is_due()),
        )
        self.known, self._pending = known, self._run.gang.council.add(values)

    def end(self, sums: Sums) -> _Verdict:
        if self._pending is None:
            self.begin(sums.loss, sums.weight, is_short=sums.shortage is not None)
        elif sums.shortage is not None:  # the others have been told that all is well
            raise sums.shortage
        assert self._pending is not None
        weight, total, terms, short, others, buffers, stop, save = self._pending.wait()
        known, again, changed = self.known, short + others > 0, others + buffers > 0
        losses: Losses = ()
        if known is not None and terms > 0 and not (again and self._trail.lag == 0):
            losses = (StepLoss(known.attempt, known.epoch, total, terms),)
        return _Verdict(weight, losses, again, short > 0, changed, stop > 0, save > 0)


def _check_finite(run: Training, losses: Losses, own: Sequence[StepLoss | None]) -> None:
    """NonFinite, on every rank, for a loss that is no number; ``own``: this rank's part of them."""
    for loss in losses:
        if not math.isfinite(loss.mean):
            _finish_writing(run)
            bad = {each.attempt for each in own if each and not math.isfinite(each.total)}
            raise loss_not_finite(run, loss.attempt, loss.mean, is_own=loss.attempt in bad)
        run.progress.add_loss(loss)


def _named(error: TargetError, run: Training) -> TargetError:
    """The error with the rank, if there are several, on which a task has failed, and the step."""
    if run.gang.num_ranks == 1:
        return error
    where = f"Rank {run.gang.rank}, step {run.progress.attempts + 1}"
    return TargetError(f"{where}: {error}")


def _finish_writing(run: Training) -> None:
    """Let the last good checkpoint become whole, so that every rank can name it."""
    run.state.wait()
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


def _save(run: Training, *, is_best: bool) -> None:
    """Keep the state as it is now; the writing goes on in the background."""
    replica, council = run.work.replica, run.gang.council
    replica.settle()
    if council.any(not are_finite(replica.parameters)):
        _finish_writing(run)
        raise parameters_not_finite(run)
    if not replica.is_sharded:
        check_same_model(replica.bare, council, f"at the checkpoint of step {run.progress.step}")
    extra = {
        "contract": run.contract,
        "plan": {"micro_batch": run.plan.micro_batch, "shares": run.plan.shares},
        "param_groups": [{"initial_lr": g["initial_lr"]} for g in run.work.optimizer.param_groups],
        "generators": council.gather(get_generators()),
    }
    run.state.save(run.progress.step, run.progress, extra, is_best=is_best)


def _begin(task: Task, config: TrainConfig, start: Start) -> ModelTrainer:
    keep_freed_blocks(_KEPT_BYTES)
    with memory_explained(partial(no_room_error, start.gang.device)):
        return ModelTrainer(prepare(task, config, start))


TRAINABLE = Trainable(TrainConfig, make_task, _begin)
#: See ``rank.life``: a rank as the launcher starts it, and one in this process.
run_rank, train = partial(be_rank, TRAINABLE), partial(live, TRAINABLE)
