"""From tasks to the table: one row per (seed, rank, width, method). Missing is None, never 0."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from muster_recipes.ssm.config import SsmConfig
from muster_recipes.ssm.moments import Moments
from muster_recipes.ssm.plan import num_blocks
from muster_recipes.ssm.problem import Problem
from muster_recipes.ssm.theory import acceptance_rate, asymptote, conditional_mean, prior_mean

Row = Mapping[str, Any]
Cell = tuple[int, int, int, str]


def summarise(config: SsmConfig, rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Merge blocks and attach theory.

    A cell whose blocks are not all there (failed, cancelled, not yet run) has no loss and says
    how many are; so has a cell in which nothing was accepted, with ``num_accepted`` 0.
    """
    cells: dict[Cell, list[Row]] = {}
    for row in rows:
        method = "gnc" if row.get("block") is not None else "gd"
        cells.setdefault((row["seed"], row["rank"], row["dim"], method), []).append(row)
    return [_summary(config, cell, members) for cell, members in sorted(cells.items())]


def _summary(config: SsmConfig, cell: Cell, members: list[Row]) -> dict[str, Any]:
    seed, rank, dim, method = cell
    first = members[0]
    problem = Problem(tuple(first["alpha"]), tuple(tuple(w) for w in first["w"]))
    done = [row for row in members if row["state"] == "done"]
    expected = num_blocks(config) if method == "gnc" else 1
    complete = len(done) >= expected
    limit = asymptote(problem)
    summary: dict[str, Any] = {
        "seed": seed,
        "rank": rank,
        "dim": dim,
        "method": method,
        "loss": None,
        "standard_error": None,
        "variance": None,
        "train_loss": None,
        "num_accepted": None,
        "num_samples": None,
        "acceptance": None,
        "predicted_acceptance": acceptance_rate(problem, dim, config.eps_train),
        "theory": conditional_mean(problem, dim),
        "asymptote": None if limit is None else limit.at(dim),
        "prior": prior_mean(problem, dim),
        "prior_sampled": None,
        "blocks_done": len(done),
        "blocks_expected": expected,
        "is_complete": complete,
        "runtime_s": sum(row["seconds"] for row in done) if done else None,
        "students_per_s": None,
        "device": ", ".join(sorted({row["device"] for row in done})) or None,
        "alpha": list(problem.alpha),
        "w": [list(w) for w in problem.w],
    }
    if complete:
        summary.update(_gnc(done) if method == "gnc" else _gd(done[0]))
    return summary


def _gnc(done: list[Row]) -> dict[str, Any]:
    accepted, drawn = Moments.none(), Moments.none()
    for row in sorted(done, key=lambda row: int(row["block"])):
        if row["num_accepted"]:
            part = Moments(row["num_accepted"], row["accepted_mean"], row["accepted_m2"])
            accepted = accepted.merge(part)
        drawn = drawn.merge(Moments(row["num_drawn"], row["drawn_mean"], row["drawn_m2"]))
    rates = [row["students_per_s"] for row in done]
    return {
        "loss": accepted.value,
        "standard_error": accepted.standard_error,
        "variance": accepted.variance,
        "num_accepted": accepted.count,
        "num_samples": drawn.count,
        "acceptance": accepted.count / drawn.count,
        "prior_sampled": drawn.value,
        "students_per_s": sum(rates) / len(rates),
    }


def _gd(row: Row) -> dict[str, Any]:
    return {"loss": row["gen_loss"], "train_loss": row["train_loss"]}
