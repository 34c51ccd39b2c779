"""The questions of ``muster launch``: the options of the command that they lead to, in our order.

A question's text, default and choices are those of the option that it is about, and an answer is
checked by the command itself, which reads what there is so far. Only the order and the conditions
are said here.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from muster.api.gangs.program import check_there
from muster.api.start.placing import device_request
from muster.base.errors import MusterError, UsageError
from muster.base.flags import Flag, kind_of_word
from muster.base.target import parse_target
from muster.cli import values
from muster.cli.help_page import is_own, own_text
from muster.cli.main import COMMANDS, read_command
from muster.cli.options import Option, options_of
from muster.cli.parse import MissingFlag, Parsed
from muster.cli.recipes import AGENTS, MAPS, RECIPES, TASKS, map_recipe
from muster.devices.inventory import Device, Inventory
from muster.devices.placement import busy_reason
from muster.train.config import TrainConfig, learning_rate, plan_batches

#: By the name of an option: the words after its flag; None: the command may decide.
Answers = Mapping[str, tuple[str, ...] | None]


@dataclass(frozen=True, kw_only=True)
class LaunchFlags:
    """What is asked first, and what becomes of the command."""

    kind: Literal["train", "run", "sweep", "map"] | None = None
    """The kind of work."""
    target: str | None = None
    """What to train, run, sweep or map: a recipe, file.py:NAME or a script."""
    args: Annotated[str | None, Flag(metavar="WORDS")] = None
    """What you would type after the name of a script, or flags of a recipe, as one text."""
    estimate: Literal["auto", "yes", "no"] = "auto"
    """Measure some steps and show what a training will take; auto: in a terminal."""
    print_: Annotated[bool, Flag(name="print")] = False
    """Print the command and run nothing."""
    yes: bool = False
    """Run it without asking."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """``form``: pick one of the choices (value → title), pick several, or type. ``default``: what
    an empty answer stands for; "": the command decides; None: there must be an answer."""

    name: str
    text: str
    form: Literal["one", "many", "text", "path"] = "text"
    choices: Mapping[str, str] = field(default_factory=dict)
    default: str | None = None
    has_words: bool = False


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The devices that a command started here would see."""

    inventory: Inventory
    num_cores: int


@dataclass(frozen=True, kw_only=True)
class Known:
    """What the answers so far come to."""

    machine: Machine
    answers: Answers
    parsed: Parsed

    @cached_property
    def num_ranks(self) -> int:
        """How many devices it would run on here: for what a question shows, not for a run."""
        request = device_request(self.parsed.options)
        if request.kind == "cpu":
            return request.count or self.machine.num_cores
        return len(request.ids) or request.count or len(self.machine.inventory.devices) or 1

    @property
    def config(self) -> TrainConfig | None:
        """Of a task; an agent has other settings."""
        found = getattr(self.parsed, "train", None)
        return found if isinstance(found, TrainConfig) else None

    @property
    def scales_lr(self) -> bool:
        """Whether the learning rate follows the batch: a rate of the recipe's own never does."""
        return self.config is not None and self.config.lr is None

    @property
    def has_data(self) -> bool:
        """Whether it is a recipe that reads something where no input is given."""
        recipe = map_recipe(self.parsed.target)
        with suppress(MusterError):  # it wants to be told which
            return recipe is not None and recipe.source(self.parsed.recipe) is not None
        return False

    def lr_words(self, rule: str) -> str:
        """The rate that a rule gives, as the training itself will compute and print it."""
        config: TrainConfig = self.parsed.make("train", lr_scaling=rule)
        return learning_rate(config, plan_batches(config, self.num_ranks))[1]


#: In which order options are asked, and when. What a command does not have is not asked.
_ASKED: Mapping[str, Callable[[Known], bool]] = {
    "input": lambda known: not known.has_data,
    "output": lambda known: True,
    "grid": lambda known: True,
    "seeds": lambda known: True,
    "devices": lambda known: not known.machine.inventory.devices and "gpu-ids" not in known.answers,
    "gpu-ids": lambda known: (
        bool(known.machine.inventory.devices) and "devices" not in known.answers
    ),
    "strategy": lambda known: known.num_ranks > 1,
    "batch-size": lambda known: known.config is not None,
    "lr": lambda known: not known.scales_lr,
    "base-lr": lambda known: known.scales_lr,
    "lr-scaling": lambda known: known.scales_lr and known.num_ranks > 1,
    "precision": lambda known: known.config is not None,
    "run-dir": lambda known: True,
}
#: What a recipe or the user's own class has is asked one by one only where it cannot be left out,
#: and else in one question at the end, which names so many.
_MAX_OWN = 12
_RECIPES = {"train": {**TASKS, **AGENTS}, "sweep": RECIPES, "map": MAPS, "run": {}}
WORK = {option.name: option for option in options_of("launch", LaunchFlags)[:3]}


def next_question(machine: Machine, answers: Answers) -> Question | None:
    """What is asked next, which may depend on all answers so far; None: the command is whole.

    UsageError for answers, given as flags, that cannot be meant.
    """
    for name, option in WORK.items():
        if name not in answers and (name != "args" or answers["kind"] == ("run",)):
            return _of_work(option, answers)
    try:
        known = Known(machine=machine, answers=answers, parsed=command_of(answers))
    except MissingFlag as missing:
        return _question(missing.option)
    shown = [option for option in known.parsed.flags if not is_own(option)]
    options = {option.name: option for option in reversed(shown)}
    for name, applies in _ASKED.items():
        if name in options and name not in answers and applies(known):
            return _about(options[name], known)
    own = [one for one in _own_flags(known.parsed) if one.name not in answers]
    return _of_own(own, answers) if own and "args" not in answers else None


def _own_flags(parsed: Parsed) -> list[Option]:
    return [one for one in parsed.flags if is_own(one) and not one.flag.is_hidden]


def command_of(answers: Answers) -> Parsed:
    """The command that the answers mean; UsageError for what it refuses."""
    for name, answer in answers.items():
        for word in answer or ():
            if name != "args" and kind_of_word(word) != "value":
                raise UsageError(
                    f"--{name} {' '.join(answer or ())}: {word} is a flag, not an answer."
                )
    (kind,), (target,) = answers["kind"] or ("",), answers["target"] or ("",)
    program = answers.get("args") or ()
    given = {name: words for name, words in answers.items() if name not in WORK}
    flags = [w for name, words in given.items() if words is not None for w in (f"--{name}", *words)]
    words = [*flags, target] if kind == "run" else [target, *flags]
    parsed = read_command(["muster", kind, *words, *program])
    if program and kind != "run" and not _own_flags(parsed):
        raise UsageError(
            f"--args has no effect with --kind {kind} and {target}.",
            hint="it is for a script, and for a recipe or a class with flags of its own.",
        )
    for group in parsed.groups:
        if group != "script":
            getattr(parsed, group)  # which checks its values
    device_request(parsed.options)
    if kind == "run":
        check_there(parsed.make("script", path=target))
    if "space" in parsed.groups:
        parse_target(target)
        parsed.space.space()
    return parsed


def answered(answers: Answers, question: Question, text: str) -> Answers:
    """``answers`` with ``text`` for ``question``; UsageError for a text that cannot be meant."""
    text = text.strip() or question.default or ""
    if not text and question.default is None:
        raise UsageError(f"--{question.name} is needed.", hint=question.text)
    if question.form == "one" and text not in question.choices:
        raise UsageError(f"--{question.name} {text}: write {' or '.join(question.choices)}.")
    words = split(question.name, text) if question.has_words else (text,)
    found = {**answers, question.name: words if text else None}
    if "target" in found:
        with suppress(MissingFlag):  # it is asked next
            command_of(found)
    return found


def split(name: str, text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError:
        raise UsageError(f"--{name} {text}: a quotation mark is missing.") from None


def _question(option: Option, **changes: Any) -> Question:
    """The question that the option itself means."""
    text = own_text(option)
    if option.arity is None and option.flag.metavar:
        text += f" Write {option.flag.metavar}"
    offered = {value: value for value in values.choices(option.kind)}
    is_path = Path in values.members(option.kind)
    default = None if option.default is MISSING else next(iter(offered), "")
    if option.default not in (MISSING, None):
        default = " ".join(values.texts(option.default))
    found: dict[str, Any] = {
        "name": option.name,
        "text": text,
        "form": "one" if offered else "path" if is_path else "text",
        "choices": offered,
        "default": default,
        "has_words": option.arity is None,
        **changes,
    }
    return Question(**found)


def _of_work(option: Option, answers: Answers) -> Question:
    (kind,) = answers.get("kind") or ("",)
    if option.name == "kind":
        kinds = {name: f"{name}: {COMMANDS[name][1]}" for name in values.choices(option.kind)}
        return _question(option, choices=kinds)
    if option.name == "args":
        return _question(option, has_words=True)
    if kind == "run":
        text = "A Python file that works under torchrun."
        return _question(option, form="path", text=text, default=None)
    text = f"A recipe ({', '.join(sorted(_RECIPES[kind]))}) or, of your own, file.py:NAME."
    return _question(option, text=text, default="digits" if kind == "train" else None)


def _of_own(own: Sequence[Option], answers: Answers) -> Question:
    """One question for all flags of a recipe or a class, which have defaults."""
    (target,) = answers["target"] or ("",)
    shown = ", ".join(f"--{option.name} {option.metavar}".strip() for option in own[:_MAX_OWN])
    more = f" and {len(own) - _MAX_OWN} more" if len(own) > _MAX_OWN else ""
    return _question(
        WORK["args"], text=f"Flags of {target} to set, with their values: {shown}{more}.",
        default="", has_words=True,
    )  # fmt: skip


def _about(option: Option, known: Known) -> Question:
    """What the machine, and the answers so far, add to an option's own question."""
    gpus = known.machine.inventory.devices
    if option.name == "devices":
        why = (known.machine.inventory.problem or "none is visible").rstrip(".")
        default = f"cpu:{min(2, known.machine.num_cores)}"
        return _question(option, text=f"No GPU ({why}). {own_text(option)}", default=default)
    if option.name == "gpu-ids":
        titles = {f"{number}": _title(number, gpu) for number, gpu in enumerate(gpus)}
        free = [number for number, gpu in zip(titles, gpus, strict=True) if not _why_not(gpu)]
        return _question(option, form="many", choices=titles, default=",".join(free or ["0"]))
    if option.name == "lr-scaling":
        rules = values.choices(option.kind)
        return _question(
            option, choices={rule: f"{rule}: {known.lr_words(rule)}" for rule in rules}
        )
    if option.name == "input":
        return _question(option, form="path", default=None)
    if option.name == "output":
        recipe = map_recipe(known.parsed.target)
        return _question(option, form="path", default=recipe.output if recipe else "output.jsonl")
    return _question(option)


def _why_not(gpu: Device) -> str:
    return gpu.lost or busy_reason(gpu) or ""


def _title(number: int, gpu: Device) -> str:
    total, used = gpu.memory_total_mib, gpu.memory_used_mib
    free = f", {total - used:,} MiB free" if total is not None and used is not None else ""
    of = "" if total is None else f" of {total:,}"
    return f"cuda:{number} {gpu.name}{free}{of}" + (f" ({why})" if (why := _why_not(gpu)) else "")
