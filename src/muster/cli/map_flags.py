"""The flags of ``muster map``, and the job they mean."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from muster.api.options import MapSettings, SweepOptions
from muster.api.recipe import MapRecipe
from muster.base.errors import TargetError, UnknownNameError, UsageError
from muster.cli.cluster_flags import ClusterFlags
from muster.cli.flags import (
    DeviceFlags,
    EarlierWorkFlags,
    FaultFlags,
    Positional,
    RunFlags,
    ShownFlags,
    Switch,
    WorkerFlags,
    join_repeated,
    options_from,
)
from muster.cli.parse import bundle, parse
from muster.cli.recipes import MAPS, is_recipe, map_recipe, names_of

if TYPE_CHECKING:
    from muster.api.map_job import MapJob

_S = MapSettings()


@dataclass(frozen=True, kw_only=True)
class InputFlags:
    """What is read, and which records of it."""

    input: str | None = None
    """A .jsonl, .csv or .parquet file (also .gz, .zst), a folder, a glob, or hf:NAME."""
    config: str | None = None
    """The configuration of a Hugging Face data set."""
    split: str | None = None
    """Its split."""
    streaming: Switch = False
    """Download it once as a stream instead of through the Hugging Face cache."""
    delimiter: str | None = None
    """What separates the columns of CSV: ';', tab. Default: a comma, in .tsv files a tab."""
    encoding: str | None = None
    """The encoding of text files, such as latin-1 or utf-16. Default: utf-8."""
    limit: int | None = None
    """Read at most this many records."""
    num_examples: int | None = None
    """The same as --limit."""
    skip: int = 0
    """Leave out this many records at the beginning."""
    start_from: int | None = None
    """The same as --skip."""
    shuffle_seed: int | None = None
    """Read in an order that this seed fixes: shards shuffled, and records inside them."""
    where: tuple[str, ...] = ()
    """Only records with COLUMN OP VALUE, such as 'level>=3'; several must all hold."""


@dataclass(frozen=True, kw_only=True)
class OutputFlags:
    """What is written."""

    output: str | None = None
    """A .jsonl, .parquet or .csv file, or a folder of parts."""
    format: Literal["jsonl", "parquet", "csv"] | None = None
    """Of the parts in a folder."""
    unordered: Switch = False
    """Write chunks as they are ready; the default is the order of the input."""
    no_ids: Switch = False
    """Add no id to records that have none."""
    keep_parts: Switch = False
    """Keep the chunks in the run folder when the output is written."""
    overwrite: Switch = False
    """Replace an output that exists and was not made by this run."""


@dataclass(frozen=True, kw_only=True)
class PaceFlags:
    """How records are handed to stages."""

    batch_size: int = _S.batch_size
    """Records per batch at the start; an out-of-memory halves it. 0: what the stages ask for."""
    chunk_rows: int | None = None
    """Records per chunk of the plan. Default: a 64th of the input, from 256 to 10,000."""
    stage_by_stage: Switch = False
    """Write each stage's output before the next begins; default: all stages in one worker."""
    max_worker_memory: str | None = None
    """Replace a worker, between batches, that holds more: 8G, 900M."""


@dataclass(frozen=True, kw_only=True)
class RecordFaultFlags:
    """What happens when something goes wrong."""

    retries: int = _S.row_retries
    """How often a record that kills or hangs its worker is tried again before it is rejected."""
    retry_exceptions: int = _S.exception_retries
    """How often a record for which a stage raised an exception is tried again."""
    timeout: str | None = None
    """Take a worker for hung that finishes no batch in this time: 90, 30m. Default: 30m."""
    keep_going: Switch = False
    """Reject records one by one although all so far have failed."""


@dataclass(frozen=True, kw_only=True)
class MapRunFlags(ShownFlags):
    """Where the run is kept and what is shown."""

    run_dir: Path | None = None
    """The run folder. Default: runs/map-<name>-<hash of the output's path>."""
    name: str | None = None
    """The name in that default."""
    monitor_interval: str = "5"
    """How often GPUs and host are sampled into the run's monitor.csv; 0: never."""


_COMMON: dict[str, Any] = {
    "source": InputFlags,
    "sink": OutputFlags,
    "pace": PaceFlags,
    "device": DeviceFlags,
    "worker": WorkerFlags,
    "cluster": ClusterFlags,
    "fault": RecordFaultFlags,
    "earlier": EarlierWorkFlags,
    "run": MapRunFlags,
}
#: Of a training on several nodes; a map has one coordinator, see decision 0018.
_OF_NODES = ("nodes", "num_nodes", "nnodes", "node_rank", "master_addr", "master_port")
_TARGET = re.compile(r"[\w./\\-]+:[A-Za-z_][\w.]*")


@dataclass(frozen=True, kw_only=True)
class Parsed:
    """``recipe`` and its ``config`` are None for stages of the user's own."""

    job: MapJob | None
    options: SweepOptions
    run: MapRunFlags
    recipe: MapRecipe | None = None
    config: Any = None


def parse_map(argv: list[str], text: str) -> Parsed:
    """The job that the words mean; ``job`` is None where a recipe is only asked something."""
    words = join_repeated(pipeline_first(argv), ("--where", "--slurm-arg"))
    name = words[0] if words and not words[0].startswith("-") else ""
    text = text.format(recipes=", ".join(sorted(MAPS)))
    recipe = map_recipe(name) if name else None
    if recipe is not None:
        return _of_recipe(recipe, name, words[1:])
    if not name:
        if "-h" in words or "--help" in words:
            parse(bundle("Map", _COMMON, {"pipeline": Positional}), ["--help"], "map", text)
        raise UsageError(
            "There is no pipeline to run: no file.py:stage and no recipe.",
            hint=f"write `muster map file.py:stage …` or one of {', '.join(sorted(MAPS))}.",
        )
    return _of_target(name, words[1:], text)


def _of_recipe(recipe: MapRecipe, word: str, words: list[str]) -> Parsed:
    own = {field.name for field in dataclasses.fields(recipe.config)}
    _refuse_nodes(words, own)
    groups = {name: _without(kind, own) for name, kind in _COMMON.items()}
    doc = (recipe.config.__doc__ or "").strip()
    kind = bundle("MapRecipe", {"recipe": recipe.config, **groups})
    text = f"Recipe {recipe.name}: {doc}"
    flags: Any = parse(kind, words, f"map {word}", text, pairs=False)
    config = flags.recipe
    options = _options(flags)
    if recipe.inform(config) is not None:
        return Parsed(job=None, options=options, run=flags.run, recipe=recipe, config=config)
    from muster.pipeline.stages import spec_of_object

    specs = tuple(spec_of_object(stage) for stage in recipe.stages(config))
    job = _job(recipe.name, specs, flags, recipe=recipe, config=config)
    return Parsed(job=job, options=options, run=flags.run, recipe=recipe, config=config)


def _of_target(target: str, words: list[str], text: str) -> Parsed:
    from muster.base.target import load_value, parse_target
    from muster.pipeline.stages import specs_of_text

    try:
        found: Any = load_value(parse_target(target))
    except TargetError:
        if target.isidentifier():
            raise UnknownNameError("pipeline", target, names_of(MapRecipe)) from None
        raise
    groups = dict(_COMMON)
    own: set[str] = set()
    if isinstance(found, type) and dataclasses.is_dataclass(found):
        from muster.cli.settings_class import settings_of

        own = {field.name for field in dataclasses.fields(found)}
        groups = {"stage": settings_of(found), **{n: _without(k, own) for n, k in groups.items()}}
    _refuse_nodes(words, own)
    flags: Any = parse(bundle("Map", groups), words, f"map {target}", text)
    values = dataclasses.asdict(flags.stage) if "stage" in groups else {}
    specs = specs_of_text(target, values, Path.cwd())
    options = _options(flags)
    name = target.rpartition(":")[2].rpartition(".")[2]
    return Parsed(job=_job(name, specs, flags), options=options, run=flags.run)


def _refuse_nodes(words: list[str], own: set[str]) -> None:
    for word in words:
        name = word.partition("=")[0].removeprefix("--").replace("-", "_")
        if word.startswith("--") and name in _OF_NODES and name not in own:
            raise UsageError(
                f"muster map has no --{name.replace('_', '-')}: one coordinator gives chunks to "
                "workers on all nodes.",
                hint="use --on slurm or --on ray with --workers. By hand, give each node its rows "
                "with --skip and --limit and an --output of its own; ids stay rows of the whole "
                "input, and JSON lines can be joined end to end.",
            )


def _job(
    name: str, specs: tuple[Any, ...], flags: Any, *, recipe: Any = None, config: Any = None
) -> MapJob:
    from muster.api.map_job import MapJob
    from muster.pipeline.sinks.spec import spec_of
    from muster.pipeline.sources.model import Selection
    from muster.pipeline.sources.table import InputOptions

    source = flags.source
    if source.input is not None and recipe is not None and recipe.source(config) is not None:
        raise UsageError(
            f"--input {source.input} has no effect on {name}: the recipe has data sets of its own.",
            hint=f"say --dataset {source.input}.",
        )
    where, options = (
        source.input,
        InputOptions(
            config=getattr(source, "config", None),
            split=getattr(source, "split", None),
            streaming=source.streaming,
            delimiter=getattr(source, "delimiter", None),
            encoding=getattr(source, "encoding", None),
        ),
    )
    if where is None and recipe is not None:
        where, options = _recipe_input(recipe, config, source)
    if where is None:
        raise UsageError("There is nothing to read.", hint="say what: --input data.jsonl.")
    output = flags.sink.output or (recipe.output if recipe is not None else None)
    if output is None:
        raise UsageError("There is no place for the result.", hint="say where: --output out.jsonl.")
    return MapJob(
        name=name,
        stages=specs,
        input=where,
        output=spec_of(output, flags.sink.format),
        selection=Selection(
            skip=_one("--skip", source.skip or None, "--start-from", source.start_from) or 0,
            limit=_one("--limit", source.limit, "--num-examples", source.num_examples),
            shuffle_seed=source.shuffle_seed,
            where=source.where,
        ),
        options=options,
        settings=MapSettings(**_settings(flags)),
        check_columns=lambda columns: recipe.check(config, columns) if recipe else None,
    )


def _options(flags: Any) -> SweepOptions:
    """A map's tasks are chunks: what is tried again here are records, by the workers themselves."""
    fault = FaultFlags(
        timeout=flags.fault.timeout,
        keep_going=flags.fault.keep_going,
    )
    run = RunFlags(**{f.name: getattr(flags.run, f.name) for f in dataclasses.fields(MapRunFlags)})
    return options_from(flags.device, flags.worker, fault, run, flags.cluster, flags.earlier)


def _recipe_input(recipe: MapRecipe, config: Any, source: Any) -> tuple[Any, Any]:
    from muster.pipeline.sources.table import InputOptions

    found = recipe.source(config)
    if not isinstance(found, tuple):
        return found, InputOptions()
    text, name, split = found
    options = InputOptions(
        config=name,
        split=split,
        streaming=source.streaming,
        delimiter=getattr(source, "delimiter", None),
        encoding=getattr(source, "encoding", None),
    )
    return text, options


def _settings(flags: Any) -> dict[str, Any]:
    pace, sink = flags.pace, flags.sink
    memory = pace.max_worker_memory
    return {
        "batch_size": getattr(pace, "batch_size", 0),
        "chunk_rows": pace.chunk_rows,
        "keeps_ids": not sink.no_ids,
        "row_retries": flags.fault.retries,
        "exception_retries": flags.fault.retry_exceptions,
        "unordered": sink.unordered,
        "stage_by_stage": pace.stage_by_stage,
        "max_worker_memory_mib": None if memory is None else parse_memory_mib(memory),
        "keep_parts": sink.keep_parts,
        "overwrite": sink.overwrite,
    }


def parse_memory_mib(text: str) -> float:
    """MiB in ``900M``, ``8G``, ``1.5GiB`` or plain bytes.

    >>> parse_memory_mib("2G")
    2048.0
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKmMgGtT]?)(?:i?[bB])?\s*", text)
    if match is None:
        raise UsageError(f"--max-worker-memory {text}: write 8G, 900M or a number of bytes.")
    power = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}[match.group(2).lower()]
    return float(match.group(1)) * 1024.0**power / (1 << 20)


def _one(first: str, value: int | None, second: str, other: int | None) -> int | None:
    if value is not None and other is not None and value != other:
        raise UsageError(f"{first} {value} and {second} {other} say the same thing differently.")
    return value if value is not None else other


def _without(kind: type, names: set[str]) -> type:
    """The group of flags less those that a recipe or a stage has itself."""
    fields = dataclasses.fields(kind)
    if not any(field.name in names for field in fields):
        return kind
    hints = kind.__annotations__
    kept: list[Any] = [
        (f.name, hints[f.name], dataclasses.field(default=f.default))
        for f in fields
        if f.name not in names
    ]
    made = dataclasses.make_dataclass(kind.__name__, kept, frozen=True, kw_only=True)
    made.__doc__ = kind.__doc__
    made.__module__ = kind.__module__
    return made


def pipeline_first(words: list[str]) -> list[str]:
    """Flags may come before the pipeline."""
    if words and not words[0].startswith("-"):
        return list(words)
    for position, word in enumerate(words):
        if is_recipe(word, MapRecipe) or (_TARGET.fullmatch(word) and (".py:" in word)):
            return [word, *words[:position], *words[position + 1 :]]
    return list(words)
