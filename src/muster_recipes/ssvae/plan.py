"""The tasks of a configuration: one per run, the baselines after them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from muster import RecipeTask
from muster_recipes.ssvae.config import SsvaeConfig, check_data
from muster_recipes.ssvae.dataset import fetch

SSVAE, SUPERVISED = "ssvae", "supervised"
#: What all tasks of a configuration have in common.
_SHARED = (
    "dataset", "data_dir", "split_seed", "num_epochs", "eval_frequency", "batch_size", "lr",
    "num_style", "num_samples", "temperature", "unlabelled", "label_protocol", "factor_scores",
    "ensemble_size",
)  # fmt: skip


def plan(config: SsvaeConfig) -> Iterator[RecipeTask]:
    """Semi-supervised runs first: their joint calls are by far the longest tasks."""
    shared = _shared(config)
    for seed in config.all_seeds:
        for num_labels in config.n_labels:
            for alpha in config.alpha_values:
                for rate in config.corruption_rates:
                    run = _run(SSVAE, seed, num_labels, alpha, rate)
                    yield RecipeTask(SSVAE, {**run, **shared}, priority=1)
    if not config.supervised:
        return
    for num_labels in config.n_labels:
        for seed in config.all_seeds:
            for rate in config.corruption_rates:
                yield RecipeTask(SUPERVISED, {**_run(SUPERVISED, seed, num_labels, None, rate), **shared})  # fmt: skip  # noqa: E501


def count(config: SsvaeConfig) -> int:
    """How many tasks ``plan`` gives."""
    cells = len(config.all_seeds) * len(config.n_labels) * len(config.corruption_rates)
    return cells * (len(config.alpha_values) + config.supervised)


def forecast(config: SsvaeConfig) -> list[str]:
    """Look at the data, fetch them once before many workers do, and say what may surprise."""
    check_data(config)
    said = fetch(config.dataset, config.data_dir)
    if config.label_protocol == "per-batch":
        said.append(
            "--label-protocol per-batch: an epoch sees the number of labels only on average, and "
            "wrong labels change from epoch to epoch; the supervised baseline has fixed ones. It "
            "is there to reproduce older tables."
        )
    return said


def _run(
    method: str, seed: int, num_labels: int, alpha: float | None, rate: float
) -> dict[str, Any]:
    return {
        "method": method,
        "n_labels": num_labels,
        "alpha": alpha,
        "corruption_rate": rate,
        "seed": seed,
    }


def _shared(config: SsvaeConfig) -> dict[str, Any]:
    values = {name: getattr(config, name) for name in _SHARED}
    folder = config.data_dir  # workers may run in another one
    return {**values, "data_dir": None if folder is None else str(folder.resolve())}
