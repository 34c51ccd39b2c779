"""One row per (seed, rank, width, method) from the rows of all tasks.

A value is shown only if all of its cell is there: with a block missing or failed, the loss, its
error and the accepted count stay empty (never 0, never an average over the blocks that happen to
be done), and the counts of what is there stand in columns of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from muster_recipes.ssm.config import SsmConfig
from muster_recipes.ssm.moments import Moments
from muster_recipes.ssm.plan import block_sizes, cells, num_blocks, problem_params
from muster_recipes.ssm.problem import Problem, make_problem
from muster_recipes.ssm.theory import acceptance_rate, asymptote, conditional_mean, prior_mean

#: Below this count of accepted students a warning says so before the work begins.
FEW_ACCEPTED = 30
_DONE, _FAILED = "done", "failed"

Cell = tuple[int, int, int]
Row = Mapping[str, Any]


@dataclass
class _Parts:
    """What has come in for one Guess & Check cell, by block."""

    done: dict[int, Row] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)


def summarise(config: SsmConfig, rows: Iterable[Row]) -> list[dict[str, Any]]:
    """The table of the recipe, in the order of `plan.cells`, Guess & Check before descent.

    A row of ``rows`` holds one task: its parameters, its result (if it is done) and ``state``;
    ``device`` is copied where it is known. Rows of tasks that are not part of ``config`` are left
    out. All rows of the table have the same columns; a value that does not exist is None.
    """
    drawn, trained = _sorted_rows(config, rows)
    pairs = config.read_pairs()
    table = []
    for seed, rank, dim in cells(config):
        problem = make_problem(**problem_params(config, pairs, seed, rank))
        head = _head(config, problem, (seed, rank, dim))
        if config.gnc:
            parts = drawn.get((seed, rank, dim), _Parts())
            table.append({**head, "method": "gnc", **_gnc_columns(config, problem, dim, parts)})
        if config.gd:
            row = trained.get((seed, rank, dim), {})
            table.append({**head, "method": "gd", **_gd_columns(row)})
    names = list(dict.fromkeys(name for row in table for name in row))
    return [{name: row.get(name) for name in names} for row in table]


def budget_warnings(config: SsmConfig) -> list[str]:
    """What to know before hours are spent: cells in which hardly any student will fit.

    The prediction takes S as Gaussian and is known for one training sequence only; where the last
    lag dominates it may be wrong by orders of magnitude, in either direction.
    """
    if not config.gnc:
        return []
    pairs = config.read_pairs()
    poor: list[tuple[float, Cell]] = []
    total = 0
    for seed, rank, dim in cells(config):
        problem = make_problem(**problem_params(config, pairs, seed, rank))
        rate = acceptance_rate(problem.h, problem.w, dim, config.eps_train)
        total += 1
        if rate is not None and rate * config.gnc_num_samples < FEW_ACCEPTED:
            poor.append((rate, (seed, rank, dim)))
    if not poor:
        return []
    rate, (seed, rank, dim) = min(poor)
    return [
        f"{len(poor)} of {total} Guess & Check cells are predicted to accept fewer than "
        f"{FEW_ACCEPTED} of {config.gnc_num_samples:.3g} students; the poorest, seed {seed}, rank "
        f"{rank}, width {dim}, about {rate * config.gnc_num_samples:.2g} (Gaussian approximation). "
        "Hint: raise --gnc-num-samples or --eps-train."
    ]


def _sorted_rows(
    config: SsmConfig, rows: Iterable[Row]
) -> tuple[dict[Cell, _Parts], dict[Cell, Row]]:
    """Rows of blocks and of trained students by cell; those not of this config are dropped."""
    sizes = list(block_sizes(config))
    drawn: dict[Cell, _Parts] = {}
    trained: dict[Cell, Row] = {}
    for row in rows:
        cell = (row["seed"], row["rank"], row["dim"])
        block = row.get("block")
        if block is None:
            trained[cell] = row
        elif block < len(sizes) and row["num_samples"] == sizes[block]:
            parts = drawn.setdefault(cell, _Parts())
            if row["state"] == _DONE:
                # Only what is merged later: a table of a million blocks stays small.
                parts.done[block] = {name: row.get(name) for name in _KEPT}
            elif row["state"] == _FAILED:
                parts.failed.add(block)
    return drawn, trained


_KEPT = (
    "accepted", "gen_mean", "gen_m2", "drawn", "prior_mean", "prior_m2", "runtime_s", "device",
)  # fmt: skip


def _head(config: SsmConfig, problem: Problem, cell: Cell) -> dict[str, Any]:
    """What both methods of a cell share."""
    seed, rank, dim = cell
    limit = asymptote(problem.h, problem.w)
    return {
        "seed": seed,
        "rank": rank,
        "dim": dim,
        "method": None,
        "state": None,
        "gen_loss": None,
        "gen_loss_se": None,
        "train_loss": None,
        "theory": conditional_mean(problem.h, problem.w, dim),
        "asymptote": limit.at(dim),
        "asymptote_note": limit.reason or None,
        "prior_mean_exact": prior_mean(problem.h, dim),
        "alpha": list(problem.alpha),
        "w": [list(row) for row in problem.w],
        "sequence_length": config.sequence_length,
        "eps_train": config.eps_train,
    }


def _gnc_columns(config: SsmConfig, problem: Problem, dim: int, parts: _Parts) -> dict[str, Any]:
    expected = num_blocks(config)
    # In the order of the blocks, whatever order they came in: sums then have the same bits.
    rows = [parts.done[block] for block in sorted(parts.done)]
    accepted, prior = Moments.none(), Moments.none()
    for row in rows:
        accepted = accepted.merge(_moments(row["accepted"], row["gen_mean"], row["gen_m2"]))
        prior = prior.merge(_moments(row["drawn"], row["prior_mean"], row["prior_m2"]))
    is_complete = len(rows) == expected
    columns: dict[str, Any] = {
        "state": _state(is_complete, bool(parts.failed)),
        "samples": config.gnc_num_samples,
        "samples_done": prior.count,
        "accepted_done": accepted.count,
        "blocks": expected,
        "blocks_done": len(rows),
        "blocks_failed": len(parts.failed),
        "acceptance_predicted": acceptance_rate(problem.h, problem.w, dim, config.eps_train),
        "runtime_s": sum(row["runtime_s"] for row in rows) if rows else None,
        "device": _devices(rows),
    }
    if is_complete:
        columns |= {
            "accepted": accepted.count,
            "acceptance": accepted.count / prior.count,
            "gen_loss": accepted.value,
            "gen_loss_se": accepted.standard_error,
            "gen_loss_variance": accepted.variance,
            "prior_mean": prior.value,
            "prior_mean_se": prior.standard_error,
        }
    return columns


def _gd_columns(row: Row) -> dict[str, Any]:
    is_complete = row.get("state") == _DONE
    columns: dict[str, Any] = {"state": _state(is_complete, row.get("state") == _FAILED)}
    if is_complete:
        columns |= {
            "gen_loss": row["gen_loss"],
            "train_loss": row["train_loss"],
            "diverged": row["diverged"],
            "runtime_s": row["runtime_s"],
            "device": row.get("device"),
        }
    return columns


def _moments(count: int, mean: float | None, m2: float | None) -> Moments:
    if count == 0 or mean is None or m2 is None:
        return Moments.none()
    return Moments(count, mean, m2)


def _state(is_complete: bool, is_failed: bool) -> str:
    if is_complete:
        return "complete"
    return "failed" if is_failed else "incomplete"


def _devices(rows: Iterable[Row]) -> str | None:
    names = sorted({str(row["device"]) for row in rows if row.get("device") is not None})
    return ", ".join(names) or None
