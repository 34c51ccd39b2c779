"""What a training shows and records on the way, and what it comes to in the end."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from muster.base.clock import human_duration
from muster.base.codec import write_json
from muster.rank.checkpoint_files import find_steps, load_state, step_folder
from muster.rank.life import load_best
from muster.rank.meter import Tally, peak_memory_mib
from muster.rank.record import Record, StepLine, read_metrics
from muster.train.curves import draw_curves
from muster.train.evaluation import monitored
from muster.train.progress import Arriving, StepLoss
from muster.train.setup import Training

_LINE_EVERY_S = 5.0
_STATUS_EVERY_S = 0.5


class Reporter:
    """Every rank has one and calls it at the same places; only rank 0's speaks and writes."""

    def __init__(self, record: Record | None, say: Callable[[str], None]) -> None:
        self._record = record
        self._say = say
        self._line_due_s = self._status_due_s = 0.0
        self._began_s = 0.0
        self._steps_at_start = 0
        self._open: dict[int, tuple[StepLine, Arriving | None]] = {}

    def begin(self, run: Training) -> None:
        self._began_s = time.monotonic()
        self._line_due_s = self._began_s + _LINE_EVERY_S
        self._steps_at_start = run.progress.step
        todo = run.limits.total_steps - run.progress.step
        self._say(
            f"train      {run.num_parameters:,} parameters, {run.contract.num_samples:,} samples, "
            f"{run.limits.steps_per_epoch} step{'s' * (run.limits.steps_per_epoch != 1)} per "
            f"epoch, {todo} to go"
        )

    def step(
        self,
        run: Training,
        losses: Sequence[StepLoss],
        lr_factor: float,
        norm: Any,
        *,
        was_used: bool,
    ) -> None:
        """An attempt has been made. Its line waits for its numbers, which a GPU gives later.

        A step that was skipped (fp16) gets no line: its number belongs to the next one.
        """
        if self._record is None:
            return
        progress = run.progress
        if was_used and progress.step % run.config.log_every == 0:
            line = StepLine(
                step=progress.step,
                epoch=progress.epoch,
                samples=progress.samples,
                loss=0.0,
                lr=run.contract.lr * lr_factor,
                seconds=run.meter.step.seconds,
                grad_norm=None,
            )
            self._open[progress.attempts - 1] = line, None if norm is None else Arriving(norm)
        self.losses(run, losses)
        loss = progress.last_loss
        now = time.monotonic()
        if now >= self._status_due_s:
            self._status_due_s = now + _STATUS_EVERY_S
            self._record.status(self._picture(run, run.meter.total, loss))
        if now >= self._line_due_s:
            self._line_due_s = now + _LINE_EVERY_S
            self._say(self._line(run, run.meter.take_recent(), loss))

    def losses(self, run: Training, losses: Sequence[StepLoss]) -> None:
        """Write the lines of the attempts whose ``losses`` are now known."""
        if self._record is None:
            return
        for loss in losses:
            if loss.attempt in self._open:
                line, norm = self._open.pop(loss.attempt)
                known = None if norm is None else norm.get()
                self._record.step(line._replace(loss=loss.mean, grad_norm=known))

    def evaluate(self, run: Training) -> bool:
        """Evaluate on the validation data, on every rank; True when it is the best so far."""
        evaluator = run.evaluators.get("val") or run.evaluators.get("test")
        if evaluator is None:
            return False
        task, progress = run.work.task, run.progress
        replica = run.work.replica
        replica.settle()
        began = time.perf_counter()
        metrics = evaluator(replica.evaluated, is_sharded=replica.is_sharded)
        # Rank 0's, should a task's summary differ between ranks: one decision for all.
        value = run.gang.council.share(monitored(metrics, task))
        is_best = progress.judge(value, higher_is_better=task.better == "higher")
        numbers = {k: v for k, v in metrics.items() if isinstance(v, int | float)}
        line = {"step": progress.step, "epoch": progress.epoch, "samples": progress.samples}
        loss = progress.epoch_loss
        known = numbers if loss is None else {"train_loss": loss, **numbers}
        progress.evaluations.append({**line, **known})
        if self._record is not None:
            seconds = time.perf_counter() - began
            self._record.line("evaluation", {**line, **known, "seconds": seconds})
            shown = "  ".join(f"{k} {v:.4f}" for k, v in numbers.items())
            train = "" if loss is None else f"train loss {loss:.4f}  "
            self._say(
                f"epoch {progress.epoch:>3}/{run.limits.epochs}  {train}{shown}"
                f"{'  *best' if is_best else ''}"
            )
        return is_best

    def flush(self) -> None:
        if self._record is not None:
            self._record.flush()

    def close(self) -> None:
        if self._record is not None:
            self._record.close()

    def _picture(self, run: Training, tally: Tally, loss: float | None) -> dict[str, Any]:
        progress = run.progress
        return {
            "kind": "train",
            "step": progress.step,
            "total_steps": run.limits.total_steps,
            "epoch": progress.epoch,
            "epochs": run.limits.epochs,
            "loss": loss,
            "best": progress.best,
            "samples_per_s": tally.samples_per_s,
            "eta_s": self._eta_s(run),
            "data_wait": tally.share(tally.data_wait_s),
            "communication": run.communication(tally),
            "mfu": run.utilisation(tally),
            "memory_mib": peak_memory_mib(run.gang.device),
        }

    def _eta_s(self, run: Training) -> float | None:
        done = run.progress.step - self._steps_at_start
        if done <= 0:
            return None
        rate = done / (time.monotonic() - self._began_s)
        return (run.limits.total_steps - run.progress.step) / rate

    def _line(self, run: Training, tally: Tally, loss: float | None) -> str:
        progress = run.progress
        parts = [f"step {progress.step}/{run.limits.total_steps}"]
        parts += [] if loss is None else [f"loss {loss:.4f}"]
        if tally.samples_per_s is not None:
            parts.append(f"{tally.samples_per_s:,.0f} samples/s")
            parts.append(f"data {tally.share(tally.data_wait_s):.0%}")
            communication = run.communication(tally)
            if run.gang.num_ranks > 1 and communication is not None:
                parts.append(f"communication {communication:.0%}")
        mfu = run.utilisation(tally)
        parts += [] if mfu is None else [f"MFU {mfu:.0%}"]
        memory = peak_memory_mib(run.gang.device)
        parts += [] if memory is None else [f"{memory:,.0f} MiB"]
        eta = self._eta_s(run)
        parts += [] if eta is None else [f"ETA {human_duration(eta)}"]
        return " · ".join(parts)


def sum_up(run: Training, why: str) -> dict[str, Any]:
    """Evaluate the reported model on every split and write the results; the same on every rank.

    That is the best or, where the task says so, the last, which the model is already. The best
    checkpoint has the names of the bare model, so it is read into that, whatever the strategy was.
    """
    reported = run.work.task.reported
    replica, chosen = run.work.replica, None
    if reported == "best":
        chosen = load_best(run.gang, run.folder, run.say, replica.bare, replica.readers)
    metrics = {
        split: evaluator(replica.evaluated, is_sharded=replica.is_sharded)
        for split, evaluator in run.evaluators.items()
    }
    memory = run.gang.council.gather(peak_memory_mib(run.gang.device))
    tally = run.meter.total
    results: dict[str, Any] = {
        "ended_because": why,
        "reported": reported,
        "metrics": metrics,
        "best": {"metric": run.work.task.monitor, "value": run.progress.best, "step": chosen},
        "final_loss": run.progress.last_loss,
        "steps": run.progress.step,
        "epochs": run.progress.epoch,
        "samples": run.progress.samples,
        "parameters": run.num_parameters,
        "strategy": run.strategy,
        "num_ranks": run.gang.num_ranks,
        "device": run.gang.device.type,
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
            "peak_memory_mib": memory,
            "machine": platform.node(),
        },
        "evaluations": run.progress.evaluations,
        "torch": torch.__version__,
    }
    if run.gang.is_first:
        write_json(run.folder.training_results, results)
        title = f"{run.folder.name} · {run.strategy}, {run.gang.num_ranks} rank(s)"
        lines = read_metrics(run.folder.metrics)
        if any(line["kind"] == "train" for line in lines):
            draw_curves(run.folder.curves, lines, run.work.task.monitor, title)
    _finish(run, chosen)
    return results


def headlines(results: Mapping[str, Any]) -> Iterator[str]:
    """What a person is shown of the results."""
    if results["reported"] == "last":
        yield "model      the last one, not the best by the validation data"
    for split, metrics in results["metrics"].items():
        shown = "  ".join(f"{k} {v:.4f}" for k, v in metrics.items() if isinstance(v, int | float))
        yield f"{split:<10} {shown}"
    measured = results["measured"]
    if measured["samples_per_s"]:
        steps = f"{measured['steps']:,} step{'s' * (measured['steps'] != 1)}"
        yield f"speed      {measured['samples_per_s']:,.0f} samples/s over {steps}"


def _finish(run: Training, chosen: int | None) -> None:
    """The task's own last word, on rank 0, while the others wait."""
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
