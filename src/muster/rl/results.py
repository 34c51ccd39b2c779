"""What a finished training of an agent comes to: the best policy judged once more, results."""

from __future__ import annotations

import math
import platform
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch

from muster.base.codec import read_json, write_json
from muster.base.errors import MusterError
from muster.rank.life import load_best
from muster.rank.meter import peak_memory_mib
from muster.rank.record import read_metrics
from muster.rl.curves import draw_curves
from muster.rl.reporting import evaluate
from muster.rl.setup import AgentRun


def sum_up(run: AgentRun, why: str) -> dict[str, Any]:
    """Play the best policy on validation and test and write the results; same on every rank."""
    chosen = load_best(run.gang, run.folder, run.say, run.policy)
    if chosen is not None:
        run.policy.normaliser.renew()
    metrics = {str(split): evaluate(run, split) for split in run.task.judged_on}
    memory = run.gang.council.gather(peak_memory_mib(run.gang.device))
    told: Mapping[str, Any] | None = None
    if run.gang.is_first:
        run.folder.figures.mkdir(exist_ok=True)
        run.policy.eval()
        seed = run.config.seed
        told = run.task.finish(run.policy, run.gang.device, seed, run.folder.figures)
        if not any(run.folder.figures.iterdir()):
            run.folder.figures.rmdir()
    shared = run.gang.council.share(dict(told or {}))
    metrics.update(shared.get("metrics", {}))
    config, progress = run.config, run.progress
    results: dict[str, Any] = {
        "ended_because": why,
        "metrics": metrics,
        "agent": {name: value for name, value in shared.items() if name != "metrics"},
        "best": {"metric": run.task.monitor, "value": progress.best, "step": chosen},
        "steps": progress.steps,
        "episodes": progress.episodes,
        "updates": progress.updates,
        "window": run.window.means(),
        "parameters": run.num_parameters,
        "num_ranks": run.gang.num_ranks,
        "num_envs": run.num_envs,
        "device": run.gang.device.type,
        "precision": str(run.precision),
        "lr": config.lr,
        "seed": config.seed,
        "measured": _measured_or_before(run, memory),
        "evaluations": progress.evaluations,
        "torch": torch.__version__,
    }
    if run.gang.is_first:
        write_json(run.folder.training_results, results)
        lines = read_metrics(run.folder.metrics)
        if any(line["kind"] == "update" for line in lines):
            title = f"{run.folder.name} · {run.env.spec.name}, {run.gang.num_ranks} rank(s)"
            draw_curves(run.folder.curves, lines, run.task.monitor, title)
    run.gang.council.meet()
    return results


def headlines(results: Mapping[str, Any]) -> Iterator[str]:
    """What a person is shown of the results."""
    for split, metrics in results["metrics"].items():
        yield f"{split:<10} {'  '.join(f'{k} {v:.4g}' for k, v in metrics.items())}"
    measured = results["measured"]
    if measured["steps_per_s"]:
        shares = ", ".join(
            f"{phase} {measured[f'{phase}_share']:.0%}"
            for phase in ("acting", "stepping", "learning")
        )
        yield f"speed      {measured['steps_per_s']:,.0f} environment steps/s ({shares})"


def _measured_or_before(run: AgentRun, memory: list[float | None]) -> dict[str, Any]:
    """Of this start; of the one before it where this one had nothing left to learn."""
    found = {**_measured(run), "peak_memory_mib": memory, "machine": platform.node()}
    if found["steps_per_s"] is None and run.folder.training_results.is_file():
        with suppress(MusterError, KeyError, TypeError):
            before = read_json(run.folder.training_results, "results of the training")
            found = dict(before["measured"])
    return found


def _measured(run: AgentRun) -> dict[str, Any]:
    seconds = run.measured.get("seconds", 0.0)
    if seconds == 0:
        return {"steps_per_s": None}
    shares = {
        f"{phase}_share": run.measured.get(phase, 0.0) / seconds
        for phase in ("acting", "stepping", "learning")
    }
    steps_per_s = run.measured["steps"] / seconds
    assert math.isfinite(steps_per_s)
    return {"steps_per_s": steps_per_s, **shares}
