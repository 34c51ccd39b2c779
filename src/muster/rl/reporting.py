"""What the training of an agent shows and records, and what it comes to in the end."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch

from muster.base.clock import human_duration
from muster.base.codec import read_json, write_json
from muster.base.errors import MusterError, UnknownNameError
from muster.rank.life import load_best
from muster.rank.meter import peak_memory_mib
from muster.rank.record import Record, read_metrics
from muster.rl.agreement import Agreed
from muster.rl.curves import draw_curves
from muster.rl.environment import Split
from muster.rl.evaluation import Episodes, play
from muster.rl.losses import explained_variance
from muster.rl.setup import AgentRun, place_of
from muster.rl.update import Learned

_LINE_EVERY_S = 5.0


class AgentReporter:
    """Every rank has one and calls it at the same places; only rank 0's speaks and writes."""

    def __init__(self, record: Record | None, say: Callable[[str], None]) -> None:
        self._record = record
        self._say = say
        self._began_s = self._line_due_s = 0.0
        self._done_at_start = 0.0

    def begin(self, run: AgentRun) -> None:
        self._began_s = time.monotonic()
        self._line_due_s = 0.0
        self._done_at_start = run.limits.fraction(run.progress)
        self._say(
            f"train      {run.num_parameters:,} parameters, {run.env.spec.name}, "
            f"{run.progress.steps:,} steps done"
        )

    def update(
        self,
        run: AgentRun,
        agreed: Agreed,
        learned: Learned,
        *,
        lr: float,
        entropy_coef: float,
        seconds: float,
    ) -> None:
        """An update has been made."""
        spent = run.clock.take()
        _add_up(run, spent, seconds)
        if self._record is None:
            return
        progress = run.progress
        per_s = run.config.rollout_steps * run.num_envs / seconds
        values: dict[str, Any] = {
            "step": progress.steps,
            "update": progress.updates,
            "episodes": progress.episodes,
            **run.window.means(),
            "policy_loss": learned.policy_loss,
            "value_loss": learned.value_loss,
            "entropy": learned.entropy,
            "kl": learned.kl,
            "first_kl": learned.first_kl,
            "clip_share": learned.clip_share,
            "explained_variance": float(explained_variance(agreed.variance_sums)),
            "grad_norm": learned.grad_norm,
            "minibatches": learned.num_minibatches,
            "stopped_early": learned.stopped_early,
            "lr": lr,
            "entropy_coef": entropy_coef,
            "steps_per_s": per_s,
            "seconds": seconds,
            **{f"{phase}_share": s / seconds for phase, s in spent.items()},
        }
        known = {k: v for k, v in values.items() if not (isinstance(v, float) and math.isnan(v))}
        self._record.line("update", known)
        self._record.status(self._picture(run, known))
        now = time.monotonic()
        if now >= self._line_due_s:
            self._line_due_s = now + _LINE_EVERY_S
            self._say(self._line(run, known))

    def evaluate(self, run: AgentRun) -> bool:
        """Play the validation episodes, on all ranks; True when the policy is the best so far."""
        began = time.perf_counter()
        metrics = evaluate(run, "val")
        monitor, progress = run.task.monitor, run.progress
        if monitor not in metrics:
            raise UnknownNameError("number to monitor", monitor, metrics)
        higher = run.task.better == "higher"
        is_best = progress.judge(metrics[monitor], metrics["return"], higher_is_better=higher)
        line = {"step": progress.steps, "update": progress.updates, "episodes": progress.episodes}
        progress.evaluations.append({**line, **metrics})
        if self._record is not None:
            seconds = time.perf_counter() - began
            smoothed = {"smoothed_return": progress.smoothed}
            self._record.line("evaluation", {**line, **metrics, **smoothed, "seconds": seconds})
            shown = "  ".join(f"{k} {v:.4g}" for k, v in metrics.items())
            self._say(f"evaluation {shown}{'  *best' if is_best else ''}")
        return is_best

    def flush(self) -> None:
        if self._record is not None:
            self._record.flush()

    def close(self) -> None:
        if self._record is not None:
            self._record.close()

    def _picture(self, run: AgentRun, values: dict[str, Any]) -> dict[str, Any]:
        """What a watcher sees: steps of a thousandth of the training, since its end may be given
        in episodes."""
        return {
            "kind": "agent",
            "step": round(1000 * run.limits.fraction(run.progress)),
            "total_steps": 1000,
            "env_steps": run.progress.steps,
            "episodes": run.progress.episodes,
            "return": values.get("return"),
            "best": run.progress.best,
            "steps_per_s": values["steps_per_s"],
            "learning_share": values.get("learning_share"),
            "eta_s": self._eta_s(run),
            "memory_mib": peak_memory_mib(run.gang.device),
        }

    def _eta_s(self, run: AgentRun) -> float | None:
        fraction = run.limits.fraction(run.progress)
        done = fraction - self._done_at_start
        if done <= 0:
            return None
        return (1 - fraction) / done * (time.monotonic() - self._began_s)

    def _line(self, run: AgentRun, values: dict[str, Any]) -> str:
        parts = [f"step {run.progress.steps:,}", f"{run.progress.episodes:,} episodes"]
        if "return" in values:
            parts.append(f"return {values['return']:.4g}")
        parts += [f"entropy {values['entropy']:.3f}", f"kl {values['kl']:.4f}"]
        parts.append(f"{values['steps_per_s']:,.0f} steps/s")
        memory = peak_memory_mib(run.gang.device)
        parts += [] if memory is None else [f"{memory:,.0f} MiB"]
        eta = self._eta_s(run)
        parts += [] if eta is None else [f"ETA {human_duration(eta)}"]
        return " · ".join(parts)


def evaluate(run: AgentRun, split: Split) -> dict[str, float]:
    """Means over ``eval_episodes`` episodes of a split, each rank playing its share; the same
    numbers on every rank, and the same episodes at every call."""
    gang, wanted = run.gang, run.config.eval_episodes
    per_rank = -(-wanted // gang.num_ranks)
    own = max(0, min(per_rank, wanted - gang.rank * per_rank))
    place = place_of(run.config, gang, split, per_rank)
    found: dict[str, list[float]] = {}
    if own > 0:
        env = run.task.environments(split, place)
        try:
            episodes = play(
                run.policy,
                env,
                deterministic=True,
                seed=place.seed,
                num_episodes=own,
                device=gang.device,
                first_env=place.first_env,
            )
        finally:
            env.close()
        found = _values(episodes)
    everyone = [part for part in gang.council.gather(found) if part]
    joined = {name: [v for part in everyone for v in part[name]] for name in everyone[0]}
    return {name: sum(values) / len(values) for name, values in joined.items()}


def _values(episodes: Episodes) -> dict[str, list[float]]:
    named = {"return": episodes.returns, "length": episodes.lengths, **episodes.extras}
    return {name: values.double().tolist() for name, values in named.items()}


def _add_up(run: AgentRun, spent: dict[str, float], seconds: float) -> None:
    """Sums for the results; the first update compiles, allocates and connects."""
    if run.progress.updates <= 1:
        return
    steps = float(run.config.rollout_steps * run.num_envs)
    for name, value in {**spent, "seconds": seconds, "steps": steps}.items():
        run.measured[name] = run.measured.get(name, 0.0) + value


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
    """The numbers of this start, or of the one before where this one had nothing left to learn."""
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
