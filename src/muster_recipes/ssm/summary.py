"""Make the table from tasks: one row per (seed, rank, width, method). Missing is None, never 0."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from muster_recipes.ssm.config import SsmConfig
from muster_recipes.ssm.plan import block_size, num_blocks
from muster_recipes.ssm.problem import Problem, problems
from muster_recipes.ssm.sampler import Moments
from muster_recipes.ssm.theory import acceptance_rate, asymptote, conditional_mean, prior_mean

Row = Mapping[str, Any]
Cell = tuple[int, int, int, str]

_GNC, _GD = "gnc", "gd"
_KEPT = (
    "state", "error", "seconds", "device", "students_per_s", "train_loss", "gen_loss",
    "num_accepted", "accepted_mean", "accepted_m2", "num_drawn", "drawn_mean", "drawn_m2",
)  # fmt: skip
#: The columns that only a complete cell fills.
_OF_COMPLETE = (
    "loss", "standard_error", "variance", "train_loss", "num_accepted", "num_samples", "acceptance",
    "prior_sampled",
)  # fmt: skip


def summarise(config: SsmConfig, rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Merge blocks and attach theory, for every cell of ``config``, also one without any task.

    A cell whose blocks are not all there (failed, cancelled, not yet run) has no loss and a note
    that says so; so has a training that diverged, and a cell in which nothing was accepted, with
    ``num_accepted`` 0. Tasks that ``config`` does not ask for are left out: a run folder also
    keeps those of a data file that has changed, or of a smaller last block.
    """
    known = {(seed, rank): problem for seed, rank, problem in problems(config)}
    parts: dict[Cell, dict[int, Row]] = {}
    for row in rows:
        block = row.get("block")
        if _is_wanted(config, known, row, block):
            cell = row["seed"], row["rank"], row["dim"], _GD if block is None else _GNC
            parts.setdefault(cell, {})[block or 0] = {name: row.get(name) for name in _KEPT}
    methods = [name for name, is_on in ((_GD, config.gd), (_GNC, config.gnc)) if is_on]
    return [
        {
            "seed": seed,
            "rank": rank,
            "dim": dim,
            "method": method,
            **dict.fromkeys(_OF_COMPLETE),
            **_result(config, method, parts.get((seed, rank, dim, method), {})),
            **_theory(config, problem, dim),
            "alpha": list(problem.alpha),
            "w": [list(w) for w in problem.w],
        }
        for (seed, rank), problem in sorted(known.items())
        for dim in sorted(config.student_dims)
        for method in methods
    ]


def _is_wanted(
    config: SsmConfig, known: Mapping[tuple[int, int], Problem], row: Row, block: int | None
) -> bool:
    problem = known.get((row["seed"], row["rank"]))
    if problem is None or row["dim"] not in config.student_dims:
        return False
    if tuple(row["alpha"]) != problem.alpha or tuple(map(tuple, row["w"])) != problem.w:
        return False
    if block is None:
        return True
    return block < num_blocks(config) and row["num_samples"] == block_size(config, block)


def _theory(config: SsmConfig, problem: Problem, dim: int) -> dict[str, Any]:
    limit, prior = asymptote(problem), _finite(prior_mean(problem, dim))
    return {
        "predicted_acceptance": acceptance_rate(problem, dim, config.eps_train),
        "theory": None if prior is None else conditional_mean(problem, dim),
        "asymptote": None if limit is None else limit.at(dim),
        "prior": prior,
    }


def _finite(value: float | None) -> float | None:
    """None for what no float holds, as the moments of few entries at many lags."""
    return value if value is not None and math.isfinite(value) else None


def _result(config: SsmConfig, method: str, parts: Mapping[int, Row]) -> dict[str, Any]:
    # By block, whatever order they came in: a merged mean then has the same bits every time.
    rows = [row for _, row in sorted(parts.items())]
    done = [row for row in rows if row["state"] == "done"]
    expected = num_blocks(config) if method == _GNC else 1
    result: dict[str, Any] = {
        "blocks_done": len(done),
        "blocks_expected": expected,
        "is_complete": len(done) == expected,
        "runtime_s": math.fsum(row["seconds"] for row in done) if done else None,
        "students_per_s": None,
        "device": ", ".join(sorted({str(row["device"]) for row in done})) or None,
        "note": None,
    }
    if len(done) < expected:
        return {**result, "note": _why_incomplete(rows, len(done), expected)}
    return {**result, **(_gnc(done) if method == _GNC else _gd(done[0]))}


def _why_incomplete(rows: list[Row], num_done: int, expected: int) -> str:
    failed = [row for row in rows if row["state"] == "failed"]
    text = f"{num_done} of {expected} tasks done"
    if not failed:
        return text
    return f"{text}, {len(failed)} failed: {failed[0]['error'] or 'no message'}"


def _gnc(done: list[Row]) -> dict[str, Any]:
    accepted, drawn = Moments.none(), Moments.none()
    for row in done:
        if row["num_accepted"]:
            part = Moments(row["num_accepted"], row["accepted_mean"], row["accepted_m2"])
            accepted = accepted.merge(part)
        drawn = drawn.merge(Moments(row["num_drawn"], row["drawn_mean"], row["drawn_m2"]))
    sampling_s = math.fsum(row["num_drawn"] / row["students_per_s"] for row in done)
    return {
        "loss": accepted.value,
        "standard_error": accepted.standard_error,
        "variance": accepted.variance,
        "num_accepted": accepted.count,
        "num_samples": drawn.count,
        "acceptance": accepted.count / drawn.count,
        "prior_sampled": _finite(drawn.value),
        "students_per_s": drawn.count / sampling_s,
        "note": None if accepted.count else "none accepted",
    }


def _gd(row: Row) -> dict[str, Any]:
    losses = {"loss": row["gen_loss"], "train_loss": row["train_loss"]}
    if all(map(math.isfinite, losses.values())):
        return losses
    return {"note": "diverged: the loss is not a finite number"}
