"""The options that only a command line has, and what several commands ask of their flags."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from muster.api.start.options import SweepOptions
from muster.base.errors import UsageError
from muster.base.flags import Flag
from muster.cli.output import ShownLevel
from muster.cli.parse import Parsed, RunPlace
from muster.farm.executors.cluster import CLUSTERS

if TYPE_CHECKING:
    from muster.farm.space import Space

LogLevel = Literal["debug", "info", "warning"]


@dataclass(frozen=True, kw_only=True)
class SpaceFlags:
    """Which settings are run."""

    grid: Annotated[tuple[str, ...], Flag(metavar="NAME=V1,V2,…")] = ()
    """All combinations of all grids. May be given several times."""
    zip: Annotated[tuple[str, ...], Flag(metavar="NAME=V1,V2,…")] = ()
    """The values of all zips advance together. May be given several times."""
    list: Annotated[Path | None, Flag(metavar="FILE")] = None
    """A .csv (with a header) or .jsonl file with one setting per line."""
    priority_column: Annotated[str, Flag(metavar="NAME")] = ""
    """A column of --list that has priorities and is not a parameter: rows with higher numbers
    begin first, and other tasks have 0. Tasks that wait already keep theirs when the list is
    edited."""
    seeds: Annotated[str | None, Flag(metavar="N|3,5,8|10:20")] = None
    """How many (100), which (3,5,8; one: 3,) or from:to (10:20); each setting once per seed."""
    seed_offset: int = 0
    """Added to every seed."""
    from_wandb: Annotated[Path | None, Flag(metavar="FILE")] = None
    """A sweep file of W&B: its parameters, metric, method, early_terminate, run_cap and, where no
    target is given, its program become a search. Flags that are given as well override it."""

    def space(self) -> Space:
        from muster.farm.space import Space  # here: of these commands, only a sweep has one

        return Space.from_texts(
            grid=self.grid,
            zipped=self.zip,
            list_file=self.list,
            seeds=self.seeds,
            seed_offset=self.seed_offset,
            priority_column=self.priority_column,
        )


@dataclass(frozen=True, kw_only=True)
class ShownFlags:
    """What is shown."""

    log_level: LogLevel = "info"
    """warning: warnings, and how it ended; info: its progress as well; debug: every event of the
    run too, on standard error."""
    quiet: bool = False
    """Show nothing but errors, not even how it ended."""
    json: bool = False
    """Print the outcome as JSON and nothing else."""
    dry_run: bool = False
    """Show what would run, where, and start nothing."""
    detach: bool = False
    """Return once the run has begun, and let it go on by itself, also after a logout; `muster
    attach`, `wait` and `cancel` take its folder. What it prints is in logs/command.log there."""

    def refuse_detach(self, why: str, hint: str) -> None:
        """UsageError where there is nothing here that could go on by itself."""
        if self.detach:
            raise UsageError(f"--detach has no effect: {why}.", hint=hint)

    @property
    def level(self) -> ShownLevel:
        """What may be shown beside JSON; UsageError where two flags contradict each other."""
        if self.quiet and self.log_level == "debug":
            raise UsageError(
                "--quiet and --log-level debug contradict each other.", hint="give one of them."
            )
        return "nothing" if self.quiet or self.json else self.log_level


@dataclass(frozen=True, kw_only=True)
class JsonFlags:
    """How it is shown."""

    json: bool = False
    """Print JSON and nothing else."""


@dataclass(frozen=True, kw_only=True)
class LookFlags(RunPlace, JsonFlags):
    """Which run, and how it is shown."""


#: Fields that are never repeated from a stored command: what was shown then, what would throw away
#: what there is now, and what was accepted knowingly that one time. By group, for a recipe or a
#: task may have fields of these names.
ONE_TIME = {
    "shown.quiet", "shown.json", "shown.dry_run", "shown.log_level", "shown.detach",
    "options.restart", "settings.overwrite", "options.allow_changed_code",
}  # fmt: skip


def job_digest(parsed: Parsed, groups: Collection[str] = ()) -> str:
    """The same for commands whose jobs do the same, in whatever order they are typed: a script has
    it, so that it starts no other run that its folder may hold by then. ``groups``: what decides;
    else all does. An array may grow by seeds.
    """
    kept = parsed.but({*ONE_TIME, "run_dir", "no_wait", "seeds"})
    said = sorted(
        (one.option.path, one.words or (str(one.value),))
        for one in kept
        if not groups or one.option.group in groups
    )
    return sha256(repr((parsed.command, said, parsed.program)).encode()).hexdigest()[:16]


def sweep_options(parsed: Parsed, **changes: Any) -> SweepOptions:
    """The options of a sweep or a map; UsageError for one that has no effect where it runs."""
    options: SweepOptions = parsed.make("options", **changes)
    if "search" in parsed.groups:
        options = parsed.search.limiting(options)
    refuse_without_effect(parsed, options.executor)
    if options.cluster.hosts and any(said.option.name == "workers" for said in parsed.said):
        raise UsageError(
            "--workers has no effect with --hosts.",
            hint="choose the GPUs of each host (a:0-3), or its workers on the CPU (a:cpu:4).",
        )
    if options.executor == "slurm":
        _ = options.cluster.whole_gpus  # refuses a part of one
    return options


def refuse_without_effect(parsed: Parsed, executor: str) -> None:
    """UsageError for a flag that has no effect with ``--on executor``."""
    for said in parsed.said:
        engines = said.option.flag.engines
        if not engines or executor in engines:
            continue
        hint = "drop it: the job's nodes find each other."
        if said.option.name.startswith("hosts"):
            hint = f"drop it: {executor} chooses the machines."
        elif said.option.name == "python":
            hint = "drop one of them: only workers of this machine have a Python of their own."
        elif "inline" in engines and executor in CLUSTERS:
            hint = f"drop it: {executor} has a queue of its own."
        elif engines != ("local",):
            others = [engine for engine in CLUSTERS if engine in engines]
            hint = f"add --on {' or '.join(others)}, or drop it."
        raise UsageError(f"--{said.option.name} has no effect with --on {executor}.", hint=hint)
