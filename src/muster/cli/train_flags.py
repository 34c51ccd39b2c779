"""The options of ``muster train`` and ``muster verify``, and the job they mean."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple

from muster.api.gangs.train import TrainJob, job_of_recipe, job_of_target
from muster.api.recipe import AgentRecipe, TrainRecipe
from muster.api.start.options import GangOptions
from muster.base.errors import TargetError, UsageError
from muster.base.flags import Flag, parse_duration
from muster.cli.gang import gang_groups, gang_options
from muster.cli.options import Part
from muster.cli.parse import Parsed, parse_groups
from muster.cli.place_of_target import split_target
from muster.cli.recipes import AGENTS, TASKS, is_named, train_recipe, unknown, vet_new
from muster.rl.config import PpoConfig
from muster.train.config import TrainConfig

#: Of a sweep, whose workers need nothing but Muster; decision 0029.
_REFUSED = {
    "python": (
        "its ranks need Muster beside the torch that they use.",
        "install muster-gpu in that environment, and start it there: .venv/bin/muster train …",
    ),
    "memory": (
        "its ranks hold one model together, and none of them goes on without the others.",
        "limit all of them together: systemd-run --user --scope -p MemoryMax=64G muster train …",
    ),
}
_RUN_DIR = "The run folder. Default: runs/<name>-<hash of the settings that decide what is learnt>."
#: What the help shows first, beside the task's own flags.
_COMMON = (
    "devices", "gpu_ids", "epochs", "num_steps", "num_envs", "batch_size", "global_batch", "lr",
    "base_lr", "lr_scaling", "precision", "strategy", "seed", "max_steps", "patience", "executor",
    "num_nodes", "run_dir", "checkpoint_interval", "restart", "dry_run", "quiet",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TrainFlags:
    """What is saved, and how devices are used."""

    checkpoint_interval: Annotated[str, Flag(metavar="TIME|Nsteps")] = "60"
    """Seconds (90, 5m) or optimizer steps (500steps) between checkpoints."""
    multi_gpu: Literal["ddp", "dp"] | None = None
    """The same as --strategy."""


class _Named(NamedTuple):
    """What is trained: a recipe, or None for a class of the user's; its own flags, None without
    any; what it is trained by, and what it says of that itself.
    """

    recipe: TrainRecipe | AgentRecipe | None
    own: Any
    config: Any
    defaults: Mapping[str, Any]


def _named(name: str) -> _Named:
    if not name:
        return _Named(None, TaskPlace, TrainConfig, {})
    recipe = train_recipe(name)
    if recipe is not None:
        kind = PpoConfig if isinstance(recipe, AgentRecipe) else TrainConfig
        return _Named(recipe, recipe.config, kind, recipe.defaults)
    task, is_agent = _task_class(name)
    own = Part(of=task, is_loose=True) if dataclasses.is_dataclass(task) else None
    return _Named(None, own, PpoConfig if is_agent else TrainConfig, task.defaults)


def flags_of_train(
    argv: Sequence[str], command: str, text: str, more: Mapping[str, Any] = MappingProxyType({})
) -> Parsed:
    """The flags alone. A class of the user's is imported, for its fields are flags.

    ``more``: groups of the command that this one is said to.
    """
    name, words = task_in(argv)
    text = text.format(recipes=", ".join(sorted({**TASKS, **AGENTS})))
    named = _named(name)
    is_kept = command == "train"
    groups = {
        **more,
        **({} if named.own is None else {"task": named.own}),
        "train": named.config.of(named.defaults),
        "own": Part(of=TrainFlags, without=() if is_kept else ("checkpoint_interval",)),
        **gang_groups(GangOptions(max_restarts=3), _RUN_DIR, may_leave=is_kept),
    }
    parsed = parse_groups(
        groups, words, f"{command} {name}".strip(), text, common=_COMMON, refused=_REFUSED
    )
    if not name:
        raise UsageError(
            "There is no task to train.",
            hint=f"write file.py:Class or one of {', '.join(sorted({**TASKS, **AGENTS}))}.",
        )
    return dataclasses.replace(parsed, groups={**groups, "train": _config(named, parsed)})


def train_job(parsed: Parsed) -> tuple[TrainJob, GangOptions]:
    """The job that the flags mean, and the options of its gang."""
    name, named = parsed.target, _named(parsed.target)
    config, rest = _config(named, parsed), _checkpoints(parsed)
    if named.recipe is not None:
        job = job_of_recipe(named.recipe, parsed.task, config, **rest)
    else:
        own = {} if named.own is None else vars(parsed.task)
        job = job_of_target(name, own, config, **rest)
    options = gang_options(parsed)
    if named.recipe is not None:
        vet_new(parsed.task, job.folder, options)
    return job, options


@dataclass(frozen=True, kw_only=True)
class TaskPlace:
    """What is trained."""

    task: Annotated[str, Flag(is_positional=True, metavar="TASK")] = ""
    """A recipe or file.py:Class; its own flags are shown with its name: muster train TASK
    --help."""


def common_groups() -> list[Any]:
    """The groups of options that trainings have, whatever is trained."""
    return [TrainConfig, PpoConfig, TrainFlags, *gang_flags()]


def gang_flags() -> list[Any]:
    """The groups that whatever runs as ranks has."""
    return list(gang_groups(GangOptions(), _RUN_DIR).values())


def task_in(argv: Sequence[str]) -> tuple[str, list[str]]:
    """What is trained, "" where it is not said, and the other words."""
    return split_target(argv, lambda word: is_named(word, TrainRecipe, AgentRecipe), common_groups)


def _task_class(name: str) -> tuple[Any, bool]:
    """The class that ``name`` means, imported for its fields and defaults, and whether it is an
    agent's."""
    from muster.base.modules import CLASS
    from muster.base.target import check_may_run, load, parse_target

    try:
        target = parse_target(name, kind=CLASS)  # before torch is imported for nothing
        check_may_run(target)
        from muster.rl.task import AgentTask, find_agent_class
        from muster.train.task import find_task_class

        found = load(target, kind=CLASS)
        if isinstance(found, type) and issubclass(found, AgentTask):
            return find_agent_class(name), True
        return find_task_class(name), False
    except TargetError:
        if name.replace("-", "_").isidentifier():
            raise unknown("task", name, TrainRecipe, AgentRecipe) from None
        raise


def _config(named: _Named, parsed: Parsed) -> TrainConfig | PpoConfig:
    given = parsed.given("train")
    config: TrainConfig | PpoConfig = named.config.of(named.defaults, **given)
    wanted = parsed.own.multi_gpu
    if isinstance(config, PpoConfig):
        if wanted == "dp":
            raise UsageError(
                "--multi-gpu dp: an agent is trained by one process per GPU.",
                hint="leave it out, or give --multi-gpu ddp.",
            )
        return config
    if wanted is None or config.strategy == wanted:
        return config
    if config.strategy != "auto":
        raise UsageError(
            f"--multi-gpu {wanted} and --strategy {config.strategy} contradict each other.",
            hint="give one of them.",
        )
    return dataclasses.replace(config, strategy=wanted)


def _checkpoints(parsed: Parsed) -> dict[str, Any]:
    text = parsed.own.checkpoint_interval
    steps = re.fullmatch(r"(\d+)\s*steps?", text.strip())
    if steps and int(steps.group(1)) == 0:
        raise UsageError(f"--checkpoint-interval {text}: write 1step or more.")
    return {
        "checkpoint_steps": int(steps.group(1)) if steps else None,
        "checkpoint_s": None if steps else parse_duration(text, "--checkpoint-interval"),
        "run_dir": parsed.given("options").get("run_dir"),
    }
