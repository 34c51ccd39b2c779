"""``muster launch``: asks what is not given, shows the command, asks once, runs it."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from muster.api.start.options import SweepOptions
from muster.api.start.placing import device_request
from muster.base.errors import EXIT_INTERRUPTED, UsageError
from muster.base.settings import read_settings
from muster.cli import output, values
from muster.cli.commands import sweep
from muster.cli.flags import SpaceFlags
from muster.cli.main import main as run_command
from muster.cli.map_flags import MapPlaces
from muster.cli.options import Part
from muster.cli.parse import Parsed, parse_groups
from muster.cli.questions import (
    WORK,
    Answers,
    Known,
    LaunchFlags,
    Machine,
    Question,
    answered,
    command_of,
    next_question,
    split,
)
from muster.devices.discovery import discover
from muster.train.config import TrainConfig

_HELP = """Answer a few questions and get the command: arrow keys, defaults, help at each question.

Every answer can be given as a flag; what is given is not asked. The command is shown and asked for
once before it runs. Without a terminal, defaults stand in and --yes or --print is needed.

Examples:
  muster launch
  muster launch --kind train --target digits --devices cpu:2 --print
  muster launch --kind run --target train.py --yes
"""


#: The flags of other commands that answer a question here.
ANSWERS = {
    "options": Part(of=SweepOptions, only=("devices", "gpu_ids", "per_gpu", "run_dir")),
    "train": Part(
        of=TrainConfig,
        only=("strategy", "batch_size", "lr", "base_lr", "lr_scaling", "precision", "epochs"),
    ),
    "space": Part(of=SpaceFlags, only=("grid", "seeds")),
    "places": Part(of=MapPlaces, only=("input", "output")),
}


def main(argv: list[str]) -> int:
    parsed = parse_groups({"launch": LaunchFlags, **ANSWERS}, argv, "launch", _HELP)
    flags: LaunchFlags = parsed.launch
    asker = make_asker()
    try:
        settings = read_settings()
        machine = Machine(inventory=discover(settings), num_cores=settings.cpu_count)
        answers = ask_all(machine, answers_in(parsed), asker)
        known = Known(machine=machine, answers=answers, parsed=command_of(answers))
        command = known.parsed.argv()
        output.say(shlex.join(command))
        if answers["kind"] == ("sweep",):
            sweep.workload_of(known.parsed)  # refuses settings that do not fit what is swept
        wants = flags.estimate == "yes" or (flags.estimate == "auto" and asker.is_terminal)
        # Without an estimate the training can still be started.
        if wants and known.config is not None and run_command(_plan_words(known)) != 0:
            output.remark("There is no estimate.")
        if flags.print_ or not (flags.yes or asker.confirm("Run it?")):
            return 0
    except (KeyboardInterrupt, EOFError):
        output.remark("Nothing was started.")
        return EXIT_INTERRUPTED
    return run_command(command[1:])


def answers_in(parsed: Parsed) -> Answers:
    """What the flags of ``muster launch`` answer already."""
    found: dict[str, tuple[str, ...] | None] = {}
    for said in parsed.said:
        name = said.option.name
        if name == "args":
            found[name] = split(name, said.value)
        elif name in WORK or said.option.group in ANSWERS:
            found[name] = tuple(values.texts(said.value))
    return found


def ask_all(machine: Machine, answers: Answers, asker: Asker) -> Answers:
    """Ask one question after the other, until the command is whole."""
    while (question := next_question(machine, answers)) is not None:
        text = asker.ask(question, partial(_problem, answers, question))
        answers = answered(answers, question, text)
    return answers


def _problem(answers: Answers, question: Question, text: str) -> str | None:
    try:
        answered(answers, question, text)
    except UsageError as error:
        return str(error).replace("\nHint: ", " ")
    return None


def _plan_words(known: Known) -> list[str]:
    """The words after ``muster`` that estimate a training by measuring a few of its steps."""
    words = ["plan", known.parsed.target, "--calibrate"]
    kind = device_request(known.parsed.options).kind
    if kind != "auto":
        words += ["--devices", f"{'cpu:' if kind == 'cpu' else ''}{known.num_ranks}"]
    if kind != "auto" and known.config is not None and known.config.batch_size is not None:
        words += ["--global-batch", f"{known.num_ranks * known.config.batch_size}"]
    return words


#: What is wrong with a typed answer, in a sentence; None: nothing.
Check = Callable[[str], str | None]


class Asker(Protocol):
    is_terminal: bool

    def ask(self, question: Question, check: Check) -> str:
        """The answer as text; KeyboardInterrupt when the user has had enough."""

    def confirm(self, text: str) -> bool: ...


class Flags:
    """Nobody to ask: defaults stand in, and a question that needs an answer names its flag."""

    is_terminal = False

    def ask(self, question: Question, check: Check) -> str:
        if question.default is None:
            raise UsageError(
                f"--{question.name} is missing, and there is no terminal to ask in.",
                hint=question.text,
            )
        return question.default

    def confirm(self, text: str) -> bool:
        raise UsageError(
            f"{text} There is no terminal to ask in.",
            hint="add --yes to run the command, or --print to only print it.",
        )


class Terminal:
    """Arrow keys to choose; an empty answer is the default, which is shown."""

    is_terminal = True

    def __init__(self) -> None:
        import questionary

        self._library: Any = questionary

    def ask(self, question: Question, check: Check) -> str:
        answer = self._prompt(question, check).unsafe_ask()
        return ",".join(answer) if isinstance(answer, list) else str(answer)

    def confirm(self, text: str) -> bool:
        return bool(self._library.confirm(text, default=True).unsafe_ask())

    def _prompt(self, question: Question, check: Check) -> Any:
        ask, text = self._library, f"{question.name}: {question.text}"
        titles = question.choices.items()
        if question.form == "one":
            choices = [ask.Choice(title, value) for value, title in titles]
            return ask.select(text, choices, default=question.default)
        if question.form == "many":
            marked = (question.default or "").split(",")
            choices = [ask.Choice(title, value, checked=value in marked) for value, title in titles]
            return ask.checkbox(text, choices, validate=lambda picked: bool(picked) or "mark one")
        # It is shown and not typed in place: whoever types would write behind it.
        if question.default is not None:
            text += f" (enter for {question.default or 'the default'})"
        prompt = ask.path if question.form == "path" else ask.text
        # Reading the command at every key would import a task again and again.
        return prompt(
            text, validate=lambda typed: check(typed) or True, validate_while_typing=False
        )


def make_asker() -> Asker:
    return Terminal() if sys.stdin.isatty() and sys.stdout.isatty() else Flags()
