"""The flags of ``muster train`` and ``muster verify``, and the job they mean."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from muster.api.gangs import GangOptions
from muster.api.options import parse_duration
from muster.api.recipe import AgentRecipe, TrainRecipe
from muster.api.train import TrainJob, job_of_recipe, job_of_target
from muster.base.errors import TargetError, UnknownNameError, UsageError
from muster.cli.flags import DeviceFlags, EarlierWorkFlags, Positional
from muster.cli.gang_flags import GangFlags, GangRunFlags, NodeFlags, PlaceFlags, gang_options_from
from muster.cli.parse import bundle, parse
from muster.cli.recipes import AGENTS, TASKS, is_recipe, names_of, train_recipe
from muster.cli.settings_class import settings_of
from muster.rl.config import PpoConfig
from muster.train.config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class TrainRunFlags(GangRunFlags):
    """Where results go and what is shown."""

    run_dir: Annotated[Path | None, tyro.conf.arg(aliases=["--save-dir"])] = None
    """The run folder. Default: runs/<name>-<hash of the settings that decide what is learnt>."""
    checkpoint_interval: str = "60"
    """Seconds (90, 5m) or optimizer steps (500steps) between checkpoints."""
    multi_gpu: Literal["ddp", "dp"] | None = None
    """The same as --strategy."""


@dataclass(frozen=True, kw_only=True)
class TrainGangFlags(GangFlags):
    """How the ranks are started and watched. There is one rank per device."""

    max_restarts: int = 3
    """How often all ranks are started again after one was killed or stalled."""


def parse_train(argv: list[str], command: str, text: str) -> tuple[TrainJob, GangOptions, Any]:
    """The job, the options of its gang and all flags."""
    words = task_first(argv)
    may_leave = command == "train"
    name = words[0] if words and not words[0].startswith("-") else ""
    text = text.format(recipes=", ".join(sorted({**TASKS, **AGENTS})))
    recipe = train_recipe(name) if name else None
    if isinstance(recipe, AgentRecipe):
        groups = {"task": recipe.config, **_groups(PpoConfig.of(recipe.defaults), may_leave)}
        flags: Any = parse(bundle("Train", groups), words[1:], f"{command} {name}", text)
        job = job_of_recipe(recipe, flags.task, _config(flags), **_rest(flags))
    elif recipe is not None:
        rest = _renamed(words[1:], recipe.config)
        groups = {"task": recipe.config, **_groups(_config_of(recipe.defaults, rest), may_leave)}
        flags = parse(bundle("Train", groups), rest, f"{command} {name}", text)
        job = job_of_recipe(recipe, flags.task, _config(flags), **_rest(flags))
    elif not name:
        kind = bundle("Train", _groups(TrainConfig(), may_leave), {"task": Positional})
        parse(kind, words, command, text)
        raise UsageError(
            "There is no task to train.", hint=f"one of {', '.join(sorted({**TASKS, **AGENTS}))}."
        )
    else:
        flags, values = _of_class(name, words[1:], command, text)
        job = job_of_target(name, values, _config(flags), **_rest(flags))
    place, earlier = (flags.place, flags.earlier) if may_leave else (None, None)
    options = gang_options_from(flags.device, flags.gang, flags.node, place, earlier)
    return job, options, flags


def _groups(config: TrainConfig | PpoConfig, may_leave: bool) -> dict[str, Any]:
    """``may_leave``: for another place than this machine, and to a run folder."""
    return {
        "train": config,
        **({"place": PlaceFlags, "earlier": EarlierWorkFlags} if may_leave else {}),
        "device": DeviceFlags,
        "gang": TrainGangFlags,
        "node": NodeFlags,
        "run": TrainRunFlags,
    }


def _of_class(name: str, words: list[str], command: str, text: str) -> tuple[Any, dict[str, Any]]:
    """Flags of a task class of the user's; it is imported here for its fields and defaults."""
    try:
        task, config = _class_and_config(name)
    except TargetError:
        if name.replace("-", "_").isidentifier():
            raise UnknownNameError("task", name, names_of(TrainRecipe, AgentRecipe)) from None
        raise
    if isinstance(config, TrainConfig):
        words = _renamed(words, task)
        config = _config_of(task.defaults, words)
    groups = _groups(config, command == "train")
    if not dataclasses.is_dataclass(task):
        return parse(bundle("Train", groups), words, f"{command} {name}", text), {}
    groups = {"task": settings_of(task), **groups}
    flags: Any = parse(bundle("Train", groups), words, f"{command} {name}", text)
    return flags, dataclasses.asdict(flags.task)


def _class_and_config(name: str) -> tuple[Any, TrainConfig | PpoConfig]:
    """The class that ``name`` means, a Task or an AgentTask, and how it is trained by default."""
    from muster.base.target import CLASS, load, parse_target
    from muster.rl.task import AgentTask, find_agent_class
    from muster.train.task import find_task_class

    found = load(parse_target(name, kind=CLASS), kind=CLASS)
    if isinstance(found, type) and issubclass(found, AgentTask):
        agent = find_agent_class(name)
        return agent, PpoConfig.of(agent.defaults)
    task = find_task_class(name)
    return task, TrainConfig.of(task.defaults)


def _config_of(defaults: Mapping[str, Any], words: list[str]) -> TrainConfig:
    """The settings that the flags start from: a recipe's warm-up gives way to a short --epochs."""
    given: dict[str, Any] = {}
    for place, word in enumerate(words):
        flag, equals, value = word.partition("=")
        text = value if equals else (words[place + 1] if place + 1 < len(words) else "")
        if flag == "--epochs" and text.isdigit():
            given["epochs"] = int(text)
        elif flag.replace("_", "-") == "--warmup-epochs":
            return TrainConfig.of(defaults)
    fitted = TrainConfig.of(defaults, **given)
    return dataclasses.replace(fitted, epochs=max(fitted.epochs, TrainConfig.of(defaults).epochs))


def _config(flags: Any) -> TrainConfig | PpoConfig:
    config: TrainConfig | PpoConfig = flags.train
    wanted = flags.run.multi_gpu
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


def _rest(flags: Any) -> dict[str, Any]:
    text = flags.run.checkpoint_interval
    steps = re.fullmatch(r"(\d+)\s*steps?", text.strip())
    if steps and int(steps.group(1)) == 0:
        raise UsageError(f"--checkpoint-interval {text}: at least one step.")
    return {
        "checkpoint_steps": int(steps.group(1)) if steps else None,
        "checkpoint_s": None if steps else parse_duration(text, "--checkpoint-interval"),
        "run_dir": flags.run.run_dir,
    }


def _renamed(words: list[str], settings: Any) -> list[str]:
    """``--num-epochs``, as many scripts call it, for ``--epochs``; a task's own flag is left."""
    own = dataclasses.fields(settings) if dataclasses.is_dataclass(settings) else ()
    if any(field.name == "num_epochs" for field in own):
        return words
    return [_NUM_EPOCHS.sub("--epochs", word) for word in words]


_NUM_EPOCHS = re.compile(r"^--num[-_]epochs(?==|$)")
_TASK = re.compile(r"[\w./\\-]+:[A-Za-z_][\w.]*")


def task_first(words: list[str]) -> list[str]:
    """Flags may come before the task: ``muster train --epochs 3 digits``."""
    if words and not words[0].startswith("-"):
        return words
    for position, word in enumerate(words):
        is_known = is_recipe(word, TrainRecipe) or is_recipe(word, AgentRecipe)
        if is_known or (_TASK.fullmatch(word) and ".py:" in word):
            return [word, *words[:position], *words[position + 1 :]]
    return words
