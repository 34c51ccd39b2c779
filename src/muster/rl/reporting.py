"""What the training of an agent shows and records on the way, and its results at the end."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from muster.base.codec import read_json
from muster.base.errors import MusterError
from muster.rank.life import Results
from muster.rank.record import write_results
from muster.rl.environment import Split
from muster.rl.evaluation import play
from muster.rl.losses import explained_variance
from muster.rl.setup import AgentRun, place_of
from muster.rl.task import make_environments
from muster.rl.update import Agreed, Learned

_PHASES = ("acting", "stepping", "learning")


def update_values(
    run: AgentRun,
    agreed: Agreed,
    learned: Learned,
    *,
    lr: float,
    entropy_coef: float,
    seconds: float,
) -> dict[str, Any]:
    """The numbers that are recorded of an update, without those that are NaN."""
    spent = run.clock.take()
    _add_up(run, spent, seconds)
    progress = run.progress
    values: dict[str, Any] = {
        "step": progress.steps,
        "update": progress.updates,
        "episodes": progress.episodes,
        **run.window.means(),
        **vars(learned),
        "explained_variance": float(explained_variance(agreed.variance_sums)),
        "lr": lr,
        "entropy_coef": entropy_coef,
        "steps_per_s": run.config.rollout_steps * run.num_envs / seconds,
        "seconds": seconds,
        **{f"{phase}_share": s / seconds for phase, s in spent.items()},
    }
    return {k: v for k, v in values.items() if not (isinstance(v, float) and math.isnan(v))}


def _add_up(run: AgentRun, spent: dict[str, float], seconds: float) -> None:
    """Add an update to the sums for the results, but not the first, which compiles and connects."""
    if run.progress.updates <= 1:
        return
    steps = float(run.config.rollout_steps * run.num_envs)
    for name, value in {**spent, "seconds": seconds, "steps": steps}.items():
        run.measured[name] = run.measured.get(name, 0.0) + value


def picture(run: AgentRun, values: dict[str, Any]) -> dict[str, Any]:
    """Where the training is, as `muster status` shows it, with the ``values`` of the last update.

    A step is a thousandth of the training there, since its end may be given in episodes.
    """
    return {
        "kind": "agent",
        "step": round(1000 * run.fraction),
        "total_steps": 1000,
        "env_steps": run.progress.steps,
        "episodes": run.progress.episodes,
        "return": values.get("return"),
        "best": run.progress.best,
        "steps_per_s": values["steps_per_s"],
        "learning_share": values.get("learning_share"),
    }


def words(run: AgentRun, values: dict[str, Any]) -> list[str]:
    """The parts of the line that tells how the last update went."""
    parts = [f"step {run.progress.steps:,}", f"{run.progress.episodes:,} episodes"]
    if "return" in values:
        parts.append(f"return {values['return']:.4g}")
    parts += [f"entropy {values['entropy']:.3f}", f"kl {values['kl']:.4f}"]
    return [*parts, f"{values['steps_per_s']:,.0f} steps/s"]


def evaluate(run: AgentRun, split: Split) -> dict[str, float]:
    """Means over ``eval_episodes`` episodes of a split, of which each rank plays its share.

    The numbers are the same on every rank, and the episodes the same at every call.
    """
    run.replica.settle()
    gang, wanted = run.gang, run.config.eval_episodes
    per_rank = -(-wanted // gang.num_ranks)
    own = max(0, min(per_rank, wanted - gang.rank * per_rank))
    place = place_of(run.config, gang, split, per_rank)
    found: dict[str, list[float]] = {}
    if own > 0:
        env = make_environments(run.task, split, place)
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
        named = {"return": episodes.returns, "length": episodes.lengths, **episodes.extras}
        found = {name: values.double().tolist() for name, values in named.items()}
    everyone = [part for part in gang.council.gather(found) if part]
    joined = {name: [v for part in everyone for v in part[name]] for name in everyone[0]}
    return {name: sum(values) / len(values) for name, values in joined.items()}


def sum_up(run: AgentRun, why: str) -> Results:
    """Play the best policy on validation and test and write the results; same on every rank."""
    config, progress, folder = run.config, run.progress, run.folder
    chosen = run.state.restore_best()
    if chosen is not None:
        run.policy.normaliser.renew()
    metrics = {str(split): evaluate(run, split) for split in run.task.judged_on}
    judged: Mapping[str, Any] | None = None
    if run.gang.is_first:
        folder.figures.mkdir(exist_ok=True)
        run.policy.eval()
        judged = run.task.finish(run.policy, run.gang.device, config.seed, folder.figures)
        if not any(folder.figures.iterdir()):
            folder.figures.rmdir()
    shared = run.gang.council.share(dict(judged or {}))
    metrics.update(shared.get("metrics", {}))
    results: Results = {
        "ended_because": why,
        "metrics": metrics,
        "agent": {name: value for name, value in shared.items() if name != "metrics"},
        "best": {"metric": run.task.monitor, "value": progress.best, "step": chosen},
        "steps": progress.steps,
        "episodes": progress.episodes,
        "updates": progress.updates,
        "window": run.window.means(),
        "parameters": run.num_parameters,
        "num_envs": run.num_envs,
        "precision": str(run.precision),
        "lr": config.lr,
        "seed": config.seed,
        "measured": _measured(run),
        "evaluations": progress.evaluations,
    }
    results = write_results(
        run.gang, folder, results, monitor=run.task.monitor, about=run.env.spec.name, say=run.say
    )
    run.gang.council.meet()
    return results


def headlines(results: Mapping[str, Any]) -> Iterator[str]:
    """Lines that show a person the results."""
    for split, metrics in results["metrics"].items():
        yield f"{split:<10} {'  '.join(f'{k} {v:.4g}' for k, v in metrics.items())}"
    measured = results["measured"]
    if measured["steps_per_s"]:
        shares = ", ".join(f"{phase} {measured[f'{phase}_share']:.0%}" for phase in _PHASES)
        yield f"speed      {measured['steps_per_s']:,.0f} environment steps/s ({shares})"


def _measured(run: AgentRun) -> Mapping[str, Any]:
    """The numbers of this start, or of the one before where this one had nothing left to do."""
    seconds = run.measured.get("seconds", 0.0)
    if seconds > 0:
        shares = {f"{phase}_share": run.measured.get(phase, 0.0) / seconds for phase in _PHASES}
        return {"steps_per_s": run.measured["steps"] / seconds, **shares}
    with suppress(MusterError, LookupError, TypeError):
        before = read_json(run.folder.training_results, "results of the training")
        return dict(before["measured"])
    return {"steps_per_s": None}
