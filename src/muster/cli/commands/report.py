"""``muster report RUN``: a run of any kind on one page, also while it is unfinished."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from muster.api.experiment import find_experiment, run_in
from muster.api.recipe import MapRecipe, Recipe
from muster.api.runs import open_run
from muster.base.codec import decode
from muster.base.errors import MusterError, UsageError
from muster.base.flags import Flag
from muster.cli import output
from muster.cli.flags import LookFlags
from muster.cli.parse import parse
from muster.cli.recipes import is_recipe, sweep_recipe

if TYPE_CHECKING:
    from muster.api.report.map import MapMaker
    from muster.api.report.sweep import SweepMaker
    from muster.run.record import RunRecord

_HELP = """Make one HTML page of a run: figures, table, configuration, environment, what it took.

The page holds its pictures and loads nothing, so it can be sent as one file. Figures are also
written as PNG and PDF, the table as CSV and JSON. RUN is of any kind (sweep, map, train, run) and
may be unfinished or failed.

Examples:
  muster report runs/ssm
  muster report digits --out ~/shared/digits
  muster report runs/ssm --json
"""


@dataclass(frozen=True, kw_only=True)
class _Report(LookFlags):
    """Where the page goes."""

    out: Annotated[Path | None, Flag(metavar="DIR")] = None
    """Write everything into this folder (DIR/index.html) and leave the run's as it is."""


def main(argv: list[str]) -> int:
    flags = parse(_Report, argv, "report", _HELP)
    if flags.out is not None and flags.out.exists() and not flags.out.is_dir():
        raise UsageError(f"--out {flags.out} is a file.", hint="name a folder for the page.")
    from muster.api.report.make import write_report

    if (experiment := find_experiment(flags.run)) is not None:
        made = []
        for phase in experiment.status():
            run = run_in(experiment.phase(phase.name))
            out = None if flags.out is None else flags.out / phase.name
            if run is not None and phase.state not in ("not begun", "refused", "damaged"):
                made += write_report(run, _maker_of(run.stored), out)
    else:
        run = open_run(flags.run)
        made = write_report(run, _maker_of(run.stored), flags.out)
    if flags.json:
        output.say_json([str(path) for path in made])
    else:
        for path in made:
            output.say(f"made: {path}")
    return 0


def _maker_of(stored: RunRecord) -> SweepMaker | MapMaker | None:
    """The recipe behind a run; None where there is none, or where it is not of this muster."""
    if stored.is_map:
        with suppress(MusterError, SystemExit):
            return _map_maker(stored)
        return None
    name = stored.spec.get("recipe")
    if not stored.is_gang and isinstance(name, str) and is_recipe(name, Recipe):
        from muster.api.report.sweep import SweepMaker

        recipe = sweep_recipe(name)
        assert recipe is not None
        return SweepMaker(recipe, decode(recipe.config, stored.spec["config"], ignore_unknown=True))
    return None


def _map_maker(stored: RunRecord) -> MapMaker | None:
    """A map keeps its command line only; what it means now is asked of that.

    Of a recipe alone: a ``file.py:stage`` would be imported, and a report only looks.
    """
    from muster.api.report.map import MapMaker
    from muster.cli.map_flags import flags_of_map, is_pipeline, read_map
    from muster.cli.values import split_target

    name, _ = split_target(stored.argv[2:], is_pipeline)
    if not is_recipe(name, MapRecipe):
        return None
    parsed = read_map(flags_of_map(stored.argv[2:]))
    if parsed.recipe is None or parsed.job is None:
        return None
    return MapMaker(parsed.recipe, parsed.config, parsed.job.output)
