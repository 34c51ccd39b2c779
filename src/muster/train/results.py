"""What a finished training comes to: the reported model evaluated once more, results, curves."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from muster.base.codec import write_json
from muster.rank.checkpoint_files import find_steps, load_state, step_folder
from muster.rank.life import load_best
from muster.rank.meter import peak_memory_mib
from muster.rank.record import read_metrics
from muster.train.curves import draw_curves
from muster.train.setup import Training


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
