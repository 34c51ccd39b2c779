"""The options of ``muster train`` and ``muster verify``, and the job they mean."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from muster.api.options import GangOptions
from muster.api.recipe import AgentRecipe, TrainRecipe
from muster.api.train import TrainJob, job_of_recipe, job_of_target
from muster.base.errors import TargetError, UnknownNameError, UsageError
from muster.base.flags import Flag, parse_duration
from muster.cli.gang_flags import gang_groups, gang_options
from muster.cli.options import Part
from muster.cli.parse import Parsed, parse_groups, word_first
from muster.cli.recipes import AGENTS, TASKS, is_named, names_of, train_recipe
from muster.rl.config import PpoConfig
from muster.train.config import TrainConfig

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


def parse_train(argv: Sequence[str], command: str, text: str) -> tuple[TrainJob, GangOptions, Any]:
    """The job, the options of its gang and all flags."""
    job, parsed = read_train(argv, command, text)
    return job, gang_options(parsed), parsed


def read_train(argv: Sequence[str], command: str, text: str) -> tuple[TrainJob, Parsed]:
    """The job and what the command line says. The words of ``parsed`` come after the task."""
    words = word_first(argv, _is_task)
    name = words[0] if words and not words[0].startswith("-") else ""
    text = text.format(recipes=", ".join(sorted({**TASKS, **AGENTS})))
    recipe = train_recipe(name) if name else None
    if recipe is not None:
        own: Any = recipe.config
        defaults, is_agent = recipe.defaults, isinstance(recipe, AgentRecipe)
    elif name:
        task, is_agent = _task_class(name)
        own = Part(of=task, is_loose=True) if dataclasses.is_dataclass(task) else None
        defaults = task.defaults
    else:
        own, defaults, is_agent = TaskPlace, {}, False
    kind: Any = PpoConfig if is_agent else TrainConfig
    is_kept = command == "train"
    groups = {
        **({} if own is None else {"task": own}),
        "train": kind.of(defaults),
        "own": Part(of=TrainFlags, without=() if is_kept else ("checkpoint_interval",)),
        **gang_groups(GangOptions(max_restarts=3), _RUN_DIR, may_leave=is_kept),
    }
    parsed = parse_groups(
        groups, words[1:] if name else words, f"{command} {name}".strip(), text, common=_COMMON
    )
    if not name:
        raise UsageError(
            "There is no task to train.",
            hint=f"write file.py:Class or one of {', '.join(sorted({**TASKS, **AGENTS}))}.",
        )
    config = _config(kind, defaults, parsed)
    parsed = dataclasses.replace(parsed, groups={**groups, "train": config})
    rest = _checkpoints(parsed)
    if recipe is not None:
        return job_of_recipe(recipe, parsed.task, config, **rest), parsed
    return job_of_target(name, {} if own is None else vars(parsed.task), config, **rest), parsed


@dataclass(frozen=True, kw_only=True)
class TaskPlace:
    """What is trained."""

    task: Annotated[str, Flag(is_positional=True, metavar="TASK")] = ""
    """A recipe or file.py:Class; its own flags are shown with its name: muster train TASK
    --help."""


def _is_task(word: str) -> bool:
    return is_named(word, TrainRecipe, AgentRecipe)


def _task_class(name: str) -> tuple[Any, bool]:
    """The class that ``name`` means, imported for its fields and defaults, and whether it is an
    agent's."""
    from muster.base.target import CLASS, load, parse_target

    try:
        target = parse_target(name, kind=CLASS)  # before torch is imported for nothing
        from muster.rl.task import AgentTask, find_agent_class
        from muster.train.task import find_task_class

        found = load(target, kind=CLASS)
        if isinstance(found, type) and issubclass(found, AgentTask):
            return find_agent_class(name), True
        return find_task_class(name), False
    except TargetError:
        if name.replace("-", "_").isidentifier():
            raise UnknownNameError("task", name, names_of(TrainRecipe, AgentRecipe)) from None
        raise


def _config(kind: Any, defaults: Mapping[str, Any], parsed: Parsed) -> TrainConfig | PpoConfig:
    config: TrainConfig | PpoConfig = kind.of(defaults, **parsed.given("train"))
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
