"""``muster report RUN``: a recipe's table and figures again, also of an unfinished run."""

from __future__ import annotations

from dataclasses import dataclass

from muster.api.report import make_report
from muster.api.runs import open_run
from muster.base.errors import UsageError
from muster.base.records import from_record
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
    config = from_record(recipe.config, run.stored.spec["config"])
    made = make_report(run, recipe, config)
    if flags.json:
        output.say_json([str(path) for path in made])
    else:
        for path in made:
            output.say(f"made: {path}")
    return 0
