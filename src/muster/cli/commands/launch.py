"""``muster launch``: asks what is not given, shows the command, asks once, runs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from muster.api.options import SweepOptions
from muster.api.recipe import MapRecipe
from muster.base.errors import EXIT_INTERRUPTED, MusterError
from muster.base.flags import Flag
from muster.base.settings import Settings, read_settings
from muster.cli import output
from muster.cli.flags import SpaceFlags
from muster.cli.launcher.answers import Answers, command_line, command_words, plan_words
from muster.cli.launcher.asking import Asker, make_asker
from muster.cli.launcher.questions import Gpu, Machine, answered, check_given, questions
from muster.cli.map_flags import MapPlaces
from muster.cli.options import Part
from muster.cli.parse import parse_groups
from muster.cli.recipes import AGENTS, MAPS, RECIPES, TASKS, load_own
from muster.devices.discovery import discover
from muster.devices.placement import busy_reason
from muster.train.config import TrainConfig

_HELP = """Answer a few questions and get the command: arrow keys, defaults, help at each question.

Every answer can be given as a flag; what is given is not asked. The command is shown and asked for
once before it runs. Without a terminal, defaults stand in and --yes or --print is needed.

Examples:
  muster launch
  muster launch --kind train --target digits --devices cpu:2 --print
  muster launch --kind run --target train.py --yes
"""


@dataclass(frozen=True, kw_only=True)
class _Launch:
    """What is asked first, and what becomes of the command."""

    kind: Literal["train", "run", "sweep", "map"] | None = None
    """The kind of work."""
    target: str | None = None
    """What to train, run, sweep or map: a recipe, file.py:NAME or a script."""
    args: str | None = None
    """Arguments of a script, as one text."""
    estimate: Literal["auto", "yes", "no"] = "auto"
    """Measure some steps and show what a training will take; auto: in a terminal."""
    print_: Annotated[bool, Flag(name="print")] = False
    """Print the command and run nothing."""
    yes: bool = False
    """Run it without asking."""


#: The flags of other commands that answer a question here.
_ANSWERS = {
    "options": Part(of=SweepOptions, only=("devices", "gpu_ids", "per_gpu", "run_dir")),
    "train": Part(
        of=TrainConfig,
        only=("strategy", "batch_size", "lr", "lr_scaling", "precision", "epochs"),
    ),
    "space": Part(of=SpaceFlags, only=("grid", "seeds")),
    "places": Part(of=MapPlaces, only=("input", "output")),
}


def main(argv: list[str]) -> int:
    parsed = parse_groups({"launch": _Launch, **_ANSWERS}, argv, "launch", _HELP)
    flags: _Launch = parsed.launch
    values: dict[str, Any] = {"kind": flags.kind, "target": flags.target, "args": flags.args}
    for group in _ANSWERS:
        values.update(parsed.given(group))
    for name in values.keys() & {"run_dir", "per_gpu"}:
        values[name] = str(values[name])
    asker = make_asker()
    try:
        machine = find_machine(read_settings())
        answers = ask_all(machine, Answers(**values), asker)
        output.say(command_line(answers))
        wants = flags.estimate == "yes" or (flags.estimate == "auto" and asker.is_terminal)
        if wants and answers.kind == "train" and answers.target not in machine.agents:
            _estimate(answers)
        if flags.print_ or not (flags.yes or asker.confirm("Run it?")):
            return 0
    except KeyboardInterrupt:
        output.remark("Nothing was started.")
        return EXIT_INTERRUPTED
    from muster.cli.main import main as run_command

    return run_command(command_words(answers))


def _estimate(answers: Answers) -> None:
    """What the plan says; without one the training can still be started."""
    from muster.cli.main import main as run_command

    if run_command(plan_words(answers)) != 0:
        output.remark("There is no estimate.")


def ask_all(machine: Machine, answers: Answers, asker: Asker) -> Answers:
    """Ask one question after the other; each may depend on the answers before it."""
    check_given(machine, answers)
    while pending := questions(machine, answers):
        answers = answered(answers, pending[0], asker.ask(pending[0]))
    return answers


def find_machine(settings: Settings) -> Machine:
    """The devices that a command started here would see, and the recipes there are."""
    inventory = discover(settings)
    gpus = tuple(
        Gpu(
            number=number,
            name=device.name,
            memory_total_mib=device.memory_total_mib,
            memory_free_mib=_free_mib(device.memory_total_mib, device.memory_used_mib),
            busy=device.lost or busy_reason(device),
        )
        for number, device in enumerate(inventory.devices)
    )
    return Machine(
        gpus=gpus,
        why_no_gpu=inventory.problem or "none is visible",
        num_cores=settings.cpu_count,
        tasks={name: load_own(TASKS[name]).defaults for name in sorted(TASKS)},
        sweeps=tuple(sorted(RECIPES)),
        agents={name: load_own(AGENTS[name]).defaults for name in sorted(AGENTS)},
        maps={name: _has_data(load_own(MAPS[name])) for name in sorted(MAPS)},
    )


def _has_data(recipe: MapRecipe) -> bool:
    """Whether it reads something where no input is given."""
    try:
        return recipe.source(recipe.config()) is not None
    except (MusterError, TypeError):  # settings without a default
        return False


def _free_mib(total_mib: int | None, used_mib: int | None) -> int | None:
    return None if total_mib is None or used_mib is None else total_mib - used_mib
