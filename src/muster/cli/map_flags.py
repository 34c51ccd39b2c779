"""The options of ``muster map``, and the job they mean."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from muster.api.recipe import MapRecipe
from muster.api.start.options import MapSettings, SweepOptions
from muster.base.errors import TargetError, UsageError
from muster.base.flags import Flag, wants_help
from muster.base.shown_text import shell_word
from muster.cli.flags import ShownFlags, sweep_options
from muster.cli.options import Part
from muster.cli.parse import Parsed, parse_groups
from muster.cli.place_of_target import split_target
from muster.cli.recipes import MAPS, is_named, map_recipe, unknown
from muster.pipeline.sources.source import Selection
from muster.pipeline.sources.table import InputOptions

if TYPE_CHECKING:
    from muster.api.maps.job import MapJob


@dataclass(frozen=True, kw_only=True)
class MapPlaces:
    """What is read and what is written."""

    input: str | None = None
    """A .jsonl, .csv or .parquet file (also .gz, .zst), a folder, a glob, or hf:NAME."""
    output: str | None = None
    """A .jsonl, .parquet or .csv file, or a folder of parts."""
    format: Literal["jsonl", "parquet", "csv"] | None = None
    """The format of the parts in a folder."""


@dataclass(frozen=True, kw_only=True)
class StagesPlace:
    """What records are put through."""

    pipeline: Annotated[str, Flag(is_positional=True)] = ""
    """A recipe or file.py:name; its own flags are shown with its name: muster map PIPELINE
    --help."""


COMMON: dict[str, Any] = {
    "places": MapPlaces,
    "selection": Selection,
    "input": InputOptions,
    "settings": MapSettings,
    "options": Part(
        of=SweepOptions,
        without=("retries", "retry_exceptions", "export_interval_s", "memory_mib"),
        texts={
            "timeout_s": "Take a worker for hung that finishes no batch in this time: 90, 30m. "
            "Default: 30m.",
            "keep_going": "Reject records one by one although all so far have failed.",
            "run_dir": "The run folder. Default: runs/map-<name>-<hash of the output's path>.",
        },
    ),
    "shown": ShownFlags,
}
#: What the help shows first.
_FIRST = (
    "pipeline", "input", "output", "devices", "gpu_ids", "batch_size", "limit", "skip", "where",
    "per_gpu", "retries", "row_retries", "timeout_s", "executor", "run_dir", "overwrite", "dry_run",
    "quiet",
)  # fmt: skip
#: Of a training on several nodes; a map has one coordinator, see decision 0018.
_OF_NODES = dict.fromkeys(
    ("nodes", "num-nodes", "nnodes", "node-rank", "master-addr", "master-port"),
    (
        "one coordinator gives chunks to workers on all nodes.",
        "use --on slurm or --on ray with --workers. By hand, give each node its rows with --skip "
        "and --limit and an --output of its own; ids stay rows of the whole input, and JSON lines "
        "can be joined end to end.",
    ),
)
_REFUSED = {
    **_OF_NODES,
    "memory": (
        "a chunk goes on with another worker, and would reject record after record.",
        "--max-worker-memory 8G replaces a worker that holds more, between two batches.",
    ),
}


@dataclass(frozen=True, kw_only=True)
class MapCommand:
    """What a command line means. ``recipe`` and its ``config`` are None for stages of the user's
    own; ``job`` is None where a recipe is only asked something."""

    job: MapJob | None
    parsed: Parsed
    recipe: MapRecipe | None = None
    config: Any = None

    @property
    def options(self) -> SweepOptions:
        """A map's tasks are chunks: what is tried again are records, by the workers themselves."""
        return sweep_options(self.parsed)

    @property
    def shown(self) -> ShownFlags:
        shown: ShownFlags = self.parsed.shown
        return shown


def flags_of_map(argv: Sequence[str], text: str = "{recipes}") -> Parsed:
    """The flags alone. A class of the user's is imported, for its fields are flags."""
    name, words = pipeline_in(argv)
    text = text.format(recipes=", ".join(sorted(MAPS)))
    recipe = map_recipe(name) if name else None
    if recipe is not None:
        doc = (recipe.config.__doc__ or "").strip()
        text = f"Recipe {recipe.name}: {doc}\n\nExample:\n  muster map {name} --output out.jsonl"
        groups = {"recipe": recipe.config, **COMMON}
    elif name:
        groups = {**_own(name, words), **COMMON}
    elif wants_help(words):
        groups = {"place": StagesPlace, **COMMON}
    else:
        raise UsageError(
            "There is no pipeline to run: no file.py:stage and no recipe.",
            hint=f"write `muster map file.py:stage …` or one of {', '.join(sorted(MAPS))}.",
        )
    command = f"map {name}".strip()
    return parse_groups(groups, words, command, text, common=_FIRST, refused=_REFUSED)


def _own(target: str, words: Sequence[str]) -> dict[str, Any]:
    from muster.base.target import load_value, parse_target

    try:
        found: Any = load_value(parse_target(target))
    except TargetError as error:
        if target.isidentifier():
            raise unknown("pipeline", target, MapRecipe) from None
        if Path(target).is_file() and not target.endswith(".py"):
            raise UsageError(
                f"{target} is a file of data, and no pipeline.",
                hint=f"write `muster map file.py:stage --input {shell_word(target)} …`.",
            ) from None
        missing = error.__cause__
        names_python = any(word.partition("=")[0] == "--python" for word in words)
        if names_python and isinstance(missing, ModuleNotFoundError):
            raise TargetError(
                f"{target} cannot be loaded by this Python, which has no module {missing.name}.",
                hint="the workers of a map run in the Python of --python, but its stages are "
                f"looked at here: import {missing.name} inside of the function or of setup().",
            ) from error
        raise
    is_class = isinstance(found, type) and dataclasses.is_dataclass(found)
    return {"stage": Part(of=found, is_loose=True)} if is_class else {}


def read_map(parsed: Parsed) -> MapCommand:
    """The job that the flags mean."""
    recipe = map_recipe(parsed.target)
    config = None if recipe is None else parsed.recipe
    found = MapCommand(job=None, parsed=parsed, recipe=recipe, config=config)
    _ = found.options  # complains first
    from muster.pipeline.stages import spec_of_object, specs_of_text

    if recipe is None:
        values = vars(parsed.stage) if "stage" in parsed.groups else {}
        specs = specs_of_text(parsed.target, values, Path.cwd())
        name = parsed.target.rpartition(":")[2].rpartition(".")[2]
        return dataclasses.replace(found, job=_job(name, specs, parsed))
    if recipe.inform(config) is not None:
        return found
    specs = tuple(spec_of_object(stage) for stage in recipe.stages(config))
    job = _job(recipe.name, specs, parsed, recipe=recipe, config=config)
    return dataclasses.replace(found, job=job)


def _job(
    name: str, specs: tuple[Any, ...], parsed: Parsed, *, recipe: Any = None, config: Any = None
) -> MapJob:
    from muster.api.maps.job import MapJob
    from muster.pipeline.sinks.formats import spec_of

    places, options = parsed.places, parsed.input
    if places.input is not None and recipe is not None and recipe.source(config) is not None:
        raise UsageError(
            f"--input {places.input} has no effect on {name}: the recipe has data sets of its own.",
            hint=f"say --dataset {places.input}.",
        )
    where = places.input
    if where is None and recipe is not None:
        where = recipe.source(config)
        if isinstance(where, tuple):
            for flag in {"config", "split"} & parsed.given("input").keys():
                raise UsageError(
                    f"--{flag} has no effect on {name}: the recipe says it with its data set.",
                    hint="leave it out.",
                )
            where, part, split = where
            options = dataclasses.replace(options, config=part, split=split)
    if where is None:
        raise UsageError("There is nothing to read.", hint="add --input data.jsonl.")
    output = places.output or (recipe.output if recipe is not None else None)
    if output is None:
        raise UsageError("There is no place for the result.", hint="add --output out.jsonl.")
    if "-" in (where, str(output)):
        raise UsageError(
            "A map reads and writes files, and neither standard input nor output (-): it goes on "
            "after a kill, which a pipe cannot.",
            hint="write the records to a file first: --input data.jsonl --output out.jsonl.",
        )
    return MapJob(
        name=name,
        stages=specs,
        input=where,
        output=spec_of(output, places.format),
        selection=parsed.selection,
        options=options,
        settings=parsed.settings,
        check_columns=lambda columns: recipe.check(config, columns) if recipe else None,
    )


def pipeline_in(argv: Sequence[str]) -> tuple[str, list[str]]:
    """What records are put through, "" where it is not said, and the other words."""
    return split_target(argv, lambda word: is_named(word, MapRecipe), COMMON.values)
