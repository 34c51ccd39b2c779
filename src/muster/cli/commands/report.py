"""``muster report RUN``: a recipe's table and figures again, also of an unfinished run."""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muster.api.report import make_report
from muster.api.runs import open_run
from muster.base.errors import UsageError
from muster.cli import output
from muster.cli.flags import Positional, Switch
from muster.cli.parse import parse
from muster.cli.recipes import RECIPES, load_recipe


@dataclass(frozen=True)
class _Report:
    run: Positional
    """The run's folder, or its name below ./runs."""
    json: Switch = False
    """Print the paths as JSON."""


def main(argv: list[str]) -> int:
    flags = parse(_Report, argv, "report", "Make a recipe's table and figures from its results.")
    run = open_run(flags.run)
    name = run.stored.spec.get("recipe")
    if name not in RECIPES:
        raise UsageError(
            f"{run.folder.name} is not the run of a recipe, so there is nothing to draw.",
            hint=f"its table is {run.folder.results_csv}.",
        )
    recipe = load_recipe(str(name))
    config = read_config(recipe.config, run.stored.spec["config"])
    made = make_report(run, recipe, config)
    if flags.json:
        output.say_json([str(path) for path in made])
    else:
        for path in made:
            output.say(f"made: {path}")
    return 0


def read_config(kind: type, record: dict[str, Any]) -> Any:
    """A recipe's config from ``run.json``: lists become tuples and texts paths, as annotated."""
    hints = typing.get_type_hints(kind)
    values: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        value = record.get(field.name, field.default)
        if isinstance(value, list):
            value = tuple(value)
        elif isinstance(value, str) and Path in (
            hints[field.name],
            *typing.get_args(hints[field.name]),
        ):
            value = Path(value)
        values[field.name] = value
    return kind(**values)
