"""What the training of a model shows and records of its steps, and its results at the end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from muster.base.shown_text import count
from muster.rank.checkpoint_files import find_steps, load_state, step_folder
from muster.rank.life import Results
from muster.rank.record import Record, StepLine, write_results
from muster.train.progress import Arriving, StepLoss
from muster.train.setup import Training


class _Open(NamedTuple):
    """A ``StepLine`` without its loss. ``norm`` is None where there is none."""

    step: int
    epoch: int
    samples: int
    lr: float
    seconds: float
    norm: Arriving | None


class StepLines:
    """The lines of steps whose numbers a GPU has not given yet; all lines of a CPU pass through."""

    def __init__(self, record: Record | None) -> None:
        self._record = record
        self._open: dict[int, _Open] = {}

    def add(self, run: Training, lr_factor: float, norm: Any) -> None:
        """Add the attempt that has just been applied.

        One that was skipped (fp16) gets no line: its number belongs to the next one.
        """
        progress = run.progress
        if self._record is None or progress.step % run.config.log_every:
            return
        self._open[progress.attempts - 1] = _Open(
            progress.step,
            progress.epoch,
            progress.samples,
            run.contract.lr * lr_factor,
            run.meter.step.seconds,
            None if norm is None else Arriving(norm),
        )

    def write(self, losses: Sequence[StepLoss]) -> None:
        """Write the lines of the attempts whose ``losses`` are now known."""
        if self._record is None:
            return
        for loss in losses:
            found = self._open.pop(loss.attempt, None)
            if found is not None:
                step, epoch, samples, lr, seconds, arriving = found
                norm = None if arriving is None else arriving.get()
                self._record.step(StepLine(step, epoch, samples, loss.mean, lr, seconds, norm))


def opening(run: Training) -> str:
    step, total = run.progress.step, run.limits.total_steps
    left = f"{total - step} to go"
    if step > total:
        left = f"none to go: it has taken {step}, and {total} are asked for now"
    return (
        f"{run.num_parameters:,} parameters, {run.contract.num_samples:,} samples, "
        f"{count(run.limits.steps_per_epoch, 'step')} per epoch, {left}"
    )


def picture(run: Training) -> dict[str, Any]:
    """Where the training is, as `muster status` shows it."""
    progress, tally = run.progress, run.meter.total
    return {
        "kind": "train",
        "step": progress.step,
        "total_steps": run.limits.total_steps,
        "epoch": progress.epoch,
        "epochs": run.limits.epochs,
        "loss": progress.last_loss,
        "best": progress.best,
        "samples_per_s": tally.samples_per_s,
        "data_wait": tally.share(tally.data_wait_s),
        "communication": run.communication(tally),
        "mfu": run.utilisation(tally),
    }


def words(run: Training) -> list[str]:
    """The parts of the line that tells how the steps since the last such line went."""
    progress, tally = run.progress, run.meter.take_recent()
    parts = [f"step {progress.step}/{run.limits.total_steps}"]
    parts += [] if progress.last_loss is None else [f"loss {progress.last_loss:.4f}"]
    if tally.samples_per_s is not None:
        parts.append(f"{tally.samples_per_s:,.0f} samples/s")
        parts.append(f"data {tally.share(tally.data_wait_s):.0%}")
        communication = run.communication(tally)
        if run.gang.num_ranks > 1 and communication is not None:
            parts.append(f"communication {communication:.0%}")
    mfu = run.utilisation(tally)
    return parts if mfu is None else [*parts, f"MFU {mfu:.0%}"]


def sum_up(run: Training, why: str) -> Results:
    """Evaluate the reported model on every split and write the results; the same on every rank.

    That is the best model or, where the task says so, the last. A checkpoint has the names of the
    bare model, so the best is read into that, whatever the strategy was.
    """
    task, progress, replica, chosen = run.work.task, run.progress, run.work.replica, None
    if task.reported == "best":
        chosen = run.state.restore_best()
    metrics = {
        split: evaluator(replica.evaluated, is_sharded=replica.is_sharded)
        for split, evaluator in run.evaluators.items()
    }
    tally = run.meter.total
    results: Results = {
        "ended_because": why,
        "reported": task.reported,
        "metrics": metrics,
        "best": {"metric": task.monitor, "value": progress.best, "step": chosen},
        "final_loss": progress.last_loss,
        "steps": progress.step,
        "epochs": progress.epoch,
        "samples": progress.samples,
        "parameters": run.num_parameters,
        "strategy": run.strategy,
        "precision": str(run.work.precision),
        "global_batch": run.contract.global_batch,
        "micro_batch": run.plan.micro_batch,
        "accumulation": run.plan.accumulation,
        "lr": run.contract.lr,
        "seed": run.contract.seed,
        "measured": {
            "steps": tally.steps,
            "samples_per_s": tally.samples_per_s,
            "data_wait_share": tally.share(tally.data_wait_s),
            "communication_share": run.communication(tally),
            "checkpoint_share": tally.share(tally.checkpoint_s),
            "mfu": run.utilisation(tally),
            "flops_per_sample": run.flops.per_sample if run.flops is not None else None,
            "kept_bytes_per_sample": run.kept_bytes,
        },
        "evaluations": progress.evaluations,
    }
    results = write_results(
        run.gang, run.folder, results, monitor=task.monitor, about=run.strategy, say=run.say
    )
    _finish(run, chosen)
    return results


def headlines(results: Mapping[str, Any]) -> Iterator[str]:
    """Lines that show a person the results."""
    if results["reported"] == "last":
        yield "model      the last one, not the best by the validation data"
    for split, metrics in results["metrics"].items():
        shown = "  ".join(f"{k} {v:.4f}" for k, v in metrics.items() if isinstance(v, int | float))
        yield f"{split:<10} {shown}"
    measured = results["measured"]
    if measured["samples_per_s"]:
        steps = count(measured["steps"], "step")
        yield f"speed      {measured['samples_per_s']:,.0f} samples/s over {steps}"


def _finish(run: Training, chosen: int | None) -> None:
    """Call the task's ``finish`` on rank 0, while the others wait."""
    if run.gang.is_first:
        run.folder.model.mkdir(exist_ok=True)
        task, device = run.work.task, run.gang.device
        if run.work.replica.is_sharded:
            task.finish(_whole_model(run, chosen).eval(), str(run.folder.model))
        else:
            model = run.work.replica.bare
            task.finish(model.cpu().eval(), str(run.folder.model))
            model.to(device)
        if not any(run.folder.model.iterdir()):
            run.folder.model.rmdir()
    run.gang.council.meet()


def _whole_model(run: Training, chosen: int | None) -> torch.nn.Module:
    """The best model, or the last, put together on the CPU from its checkpoint."""
    folder = run.folder.checkpoints
    step = find_steps(folder)[0] if chosen is None else chosen
    model = run.work.task.model()
    load_state(step_folder(folder, step), model, None, {}, None)
    return model
