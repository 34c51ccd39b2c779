"""The recipe ``reasoning`` as ``muster map`` sees it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from muster import MapRecipe
from muster_recipes.reasoning import summary
from muster_recipes.reasoning.config import ReasoningConfig
from muster_recipes.reasoning.host import SPEED_UPS, Host
from muster_recipes.reasoning.hub import refresh
from muster_recipes.reasoning.sources import (
    DATA_SETS,
    check_columns,
    dataset_info,
    list_datasets,
    source_of,
)
from muster_recipes.reasoning.stages import Evaluate, Finish, Generate, Improve, Read


def stages(config: ReasoningConfig) -> list[Any]:
    """The stages of a run, as dataclass instances. Raises UsageError for settings without sense."""
    config.check()
    engine = config.engine_spec
    solutions = config.sampling
    grades = dataclasses.replace(solutions, temperature=config.eval_temperature)
    host = Host(
        optimize_gpu=config.optimize_gpu,
        no_warnings=config.no_warnings,
        low_memory=config.low_memory,
    )
    common: dict[str, Any] = {
        "engine": engine, "seed": config.seed, "host": host, "timestamps": config.timestamps,
    }  # fmt: skip
    judging: dict[str, Any] = {"grading": "model" if config.is_graded else "off"}
    made: list[Any] = [
        read_stage(config),
        Generate(**common, sampling=solutions),
        Evaluate(**common, **judging, sampling=grades),
    ]
    if config.max_iterations:
        made.append(
            Improve(
                **common,
                **judging,
                sampling=solutions,
                eval_sampling=grades,
                quality_threshold=config.quality_threshold,
                max_iterations=config.max_iterations,
            )
        )
    return [*made, Finish(keep=config.keep, quality_threshold=config.quality_threshold)]


def read_stage(config: ReasoningConfig) -> Read:
    """The stage that reads rows; columns named by flags come before those of the table."""
    item = DATA_SETS.get(config.dataset)
    is_named = bool(config.problem_column or config.answer_column)
    return Read(
        layout=item.layout if item is not None and not is_named else "",
        problem_column=config.problem_column,
        answer_column=config.answer_column,
    )


def source(config: ReasoningConfig) -> Any:
    """(text, configuration or None, split or None) for the door of sources, or records."""
    found = source_of(config)
    if found.records is not None:
        return found.records
    return found.text, found.config or None, found.split or None


def inform(config: ReasoningConfig) -> list[dict[str, Any]] | None:
    """The rows of --list-datasets or --dataset-info; None where neither was asked."""
    if config.dataset_info:
        return [dataset_info(config.dataset_info)]
    return list_datasets() if config.list_datasets else None


def remarks(config: ReasoningConfig) -> list[str]:
    """Sentences on what is used by default, and on what --force-download has fetched.

    This is called before the input is opened, and not for a dry run.
    """
    lines = []
    if not config.model and config.engine != "openai":
        what = "the model that ships with muster (arith)"
        name = what if config.dataset == "arith" else config.model_name
        lines.append(f"Model: {name}, because --model names none.")
    if not config.is_graded:
        lines.append(
            "Grading is off: quality is 1 for a verified answer, 0 for a wrong one or none."
        )
    if config.optimize_gpu:
        lines += [f"On CUDA workers {line}." for line in SPEED_UPS]
    if config.cleanup_delay:
        lines.append(
            f"--cleanup-delay {config.cleanup_delay:g} does nothing: sleeping frees no memory."
        )
    return [*lines, *(refresh(config) if config.force_download else [])]


def summarise(config: ReasoningConfig, rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The numbers of the summary that are known; its histograms are in the figure."""
    left_out = {"histograms"} if config.is_graded else {"histograms", "mean_scores", "ungraded"}
    found = summary.summarise(rows, config.quality_threshold)
    return {n: value for n, value in found.items() if n not in left_out and value is not None}


def draw(config: ReasoningConfig, rows: Iterable[Mapping[str, Any]], folder: Path) -> list[Path]:
    found = summary.summarise(rows, config.quality_threshold)
    return [summary.draw(found, folder / "scores.png")]


RECIPE = MapRecipe(
    name="reasoning",
    config=ReasoningConfig,
    stages=stages,
    source=source,
    inform=inform,
    check=check_columns,
    remarks=remarks,
    summarise=summarise,
    draw=draw,
    output="reasoning.jsonl",
)
