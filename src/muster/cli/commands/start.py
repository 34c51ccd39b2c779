"""``muster start FILE``: what an experiment file says, as one run or one phase after the other."""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from muster.api.experiments.experiment import (
    PRODUCT,
    ExperimentFolder,
    is_done,
    run_in,
    state_of_all,
    value_of,
)
from muster.api.experiments.file import (
    Experiment,
    OrderKeys,
    Phase,
    needs,
    read_experiment,
    references,
    resolved,
)
from muster.api.runs import Run
from muster.api.start.options import MapSettings, SweepOptions
from muster.api.sweeps.plans import go_to
from muster.base.errors import (
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_REQUEUE,
    EXIT_SOME_FAILED,
    MusterError,
    UsageError,
)
from muster.base.flags import Flag
from muster.base.journal import Journal
from muster.base.settings import variable
from muster.base.shown_text import shell_word
from muster.base.signals import stop_code
from muster.cli import output
from muster.cli.commands import map as map_command
from muster.cli.commands import run as run_command
from muster.cli.commands import sweep, train
from muster.cli.experiment_words import (
    Effective,
    Line,
    command_text,
    effective,
    line_of,
    refuse_unknown_of_all,
)
from muster.cli.flags import ONE_TIME, ShownFlags
from muster.cli.main import read_command
from muster.cli.options import Part
from muster.cli.parse import Parsed, parse_groups
from muster.cli.place_of_target import split_target

_HELP = """Start what an experiment file says, or go on with it: the same command again.

FILE is TOML or YAML (`muster init FILE` writes one). Its keys are the flags of its command; with
phases, each is a run in a folder of its own, and begins when those that it needs are done.

Examples:
  muster start experiment.toml
  muster start experiment.toml --set seeds=5 --set 'grid.lr=[0.1,0.2]' --dry-run
"""
_COMMANDS: Mapping[str, Callable[[Parsed, Sequence[str]], int]] = {
    "sweep": sweep.start, "map": map_command.start, "train": train.start, "run": run_command.start,
}  # fmt: skip
#: Flags whose default is a variable's value, where it is set.
_FROM_ENVIRONMENT = {
    "devices": "CUDA_VISIBLE_DEVICES", "node-rank": "NODE_RANK", "master-addr": "MASTER_ADDR",
    "master-port": "MASTER_PORT",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Start:
    """What is started."""

    file: Annotated[Path, Flag(is_positional=True)]
    """An experiment file: .toml, .yaml or .yml."""
    set: Annotated[tuple[str, ...], Flag(metavar="A.B=VALUE")] = ()
    """Replace a key of the file: epochs=3, grid.lr=[0.1,0.2], or teacher.epochs=3 of a phase. May
    be given several times."""


GROUPS: dict[str, Any] = {
    "start": _Start,
    "options": Part(of=SweepOptions, only=("allow_changed_code", "restart")),
    "settings": Part(of=MapSettings, only=("overwrite",)),
    "shown": ShownFlags,
}


def main(argv: list[str]) -> int:
    file, words = file_in(argv)
    parsed = parse_groups(GROUPS, [*([file] if file else []), *words], "start", _HELP)
    experiment = read_experiment(parsed.start.file, parsed.start.set)
    before, folder = Path.cwd(), experiment.folder
    # Both are seen from here, which is left; the record of the experiment has them.
    experiment = dataclasses.replace(
        experiment, file=experiment.file.absolute(), folder=folder.absolute()
    )
    go_to(str(folder))
    if Path.cwd() != before:
        output.remark(f"Paths begin in {Path.cwd()}, as {parsed.start.file} says.")
    return start(experiment, parsed)


def file_in(argv: Sequence[str]) -> tuple[str, list[str]]:
    """The experiment file, "" where it is not said, and the other words."""
    suffixes = (".toml", ".yaml", ".yml")
    return split_target(argv, lambda word: word.endswith(suffixes), GROUPS.values)


def resume(folder: ExperimentFolder, argv: list[str]) -> int:
    """Go on with an experiment as it was last started. ``argv``: the words behind its name."""
    groups = {name: group for name, group in GROUPS.items() if name != "start"}
    parsed = parse_groups(groups, argv, "resume", _HELP)
    experiment = folder.read()
    go_to(str(experiment.folder))
    return start(experiment, parsed)


def start(experiment: Experiment, parsed: Parsed) -> int:
    shown: ShownFlags = parsed.shown
    folder = ExperimentFolder(experiment.run_dir)
    if experiment.is_single and folder.exists():
        raise UsageError(
            f"{folder.path} is the folder of an experiment with phases, not of a run.",
            hint="choose another name or run_dir.",
        )
    # All phases are read before any begins: a name that is wrong in the last one is told at once.
    lines = [line_in(experiment, phase, folder) for phase in experiment.phases]
    refuse_unknown_of_all(experiment.phases, lines)
    if parsed.given("settings") and not any("settings" in one.parsed.groups for one in lines):
        raise UsageError("--overwrite has no effect: nothing here is a map.", hint="leave it out.")
    if shown.dry_run:
        _show(experiment, lines, folder, is_json=shown.json)
        return EXIT_OK
    moment = parsed.words(without=("file", "set", "json"))
    if experiment.is_single:
        moment += ["--json"] if shown.json else []
        line = line_in(experiment, experiment.phases[0], folder, moment)
        return _COMMANDS[line.phase.said.command](line.parsed, line.parsed.argv())
    if not shown.quiet and not shown.json:
        output.say(f"{experiment.run_dir}: {', '.join(one.name for one in experiment.phases)}")
    moment += ["--quiet"] if shown.json and not shown.quiet else []
    with folder.working(experiment) as journal:
        code = EXIT_SOME_FAILED
        try:
            code = _ExperimentStart(experiment, folder, journal, moment, shown).all()
        except KeyboardInterrupt as error:
            code = stop_code(getattr(error, "number", 0))
            raise
        finally:
            with suppress(OSError):  # the caller knows it all the same
                journal.write("over", exit_code=code)
    if code in (EXIT_INTERRUPTED, EXIT_REQUEUE) and not (shown.quiet or shown.json):
        output.say(
            f"{folder.path} is not over; go on with it: muster resume {shell_word(folder.path)}"
        )
    if shown.json:
        phases = folder.status()
        output.say_json({
            "path": str(folder.path), "state": state_of_all(phases, is_running=False),
            "exit_code": code, "phases": [dataclasses.asdict(one) for one in phases],
        })  # fmt: skip
    return code


def line_in(
    experiment: Experiment, phase: Phase, folder: ExperimentFolder, moment: Sequence[str] = ()
) -> Line:
    """The command line of a phase, with those values of other phases that can be told by now."""
    place = folder.path if experiment.is_single else folder.phase(phase.name).path
    order = {one.name: one.order for one in experiment.phases}

    def waits(value: Any) -> bool:
        heads = [one.head for one in references(value) if one.rest.startswith("best.")]
        return not all(_has_best(run_in(folder.phase(one)), order.get(one)) for one in heads)

    def found(value: Any) -> Any:
        if waits(value):
            return value
        return resolved(value, lambda one: value_of(experiment, folder, phase, one))

    said = dataclasses.replace(
        phase.said, target=found(phase.said.target),
        program=tuple(str(found(word)) for word in phase.program),
    )  # fmt: skip
    settings = tuple(dataclasses.replace(one, value=found(one.value)) for one in phase.settings)
    known = dataclasses.replace(phase, said=said, settings=settings)
    later = {one.key for one in phase.settings if waits(one.value)}
    return line_of(known, place, moment, later)


def _has_best(run: Run | None, order: OrderKeys | None) -> bool:
    """Whether a phase has ended, so that what comes after it may read its results."""
    if run is None or order is None:
        return False
    try:
        state = run.status().state
    except MusterError:  # it is damaged, which its own start says
        return False
    return state == "done" or (state == "failed" and order.may_fail)


class _ExperimentStart:
    """One start of an experiment with phases."""

    def __init__(
        self, experiment: Experiment, folder: ExperimentFolder, journal: Journal,
        moment: list[str], shown: ShownFlags,
    ) -> None:  # fmt: skip
        self._experiment, self._folder, self._journal = experiment, folder, journal
        self._moment, self._shown = moment, shown
        self._ended: dict[str, bool] = {}  # whether what comes after may begin

    def all(self) -> int:
        code = EXIT_OK
        for phase in self._experiment.phases:
            missing = [one for one in needs(phase) if not self._ended[one]]
            if missing:
                self._say(f"{phase.name}: not begun, because {missing[0]} is not done")
                self._ended[phase.name] = False
                continue
            ended = self._one(phase)
            if ended in (EXIT_INTERRUPTED, EXIT_REQUEUE):
                return ended
            code = code or ended
        if code == EXIT_OK and not all(self._ended.values()):
            return EXIT_REQUEUE  # something is still under way elsewhere
        return code

    def _one(self, phase: Phase) -> int:
        """Do a phase, unless it is done; returns its exit code."""
        name, why, lacks = phase.name, "", ""
        folder = self._folder.phase(name)
        try:
            self._require(phase)
            line = line_in(self._experiment, phase, self._folder, self._moment)
            begins_anew = bool(line.parsed.given("options").get("restart"))
            if not begins_anew and is_done(run_in(folder), _says_the_same(line.parsed)):
                self._say(f"{name}: done")
                code = EXIT_OK
            else:
                self._say(f"{name}: {command_text(line.parsed.argv(without=ONE_TIME))}")
                self._journal.write("begin", phase=name)
                code = _COMMANDS[phase.said.command](line.parsed, line.parsed.argv())
            lacks = self._missing_product(phase) if code == EXIT_OK else ""
            if lacks:
                why, code = lacks, EXIT_SOME_FAILED
        except MusterError as error:
            why, code = str(error), error.exit_code
        if why:
            output.complain(f"{name}: {why}")
        about = {"why": why} if why else {}
        about |= {"kind": PRODUCT} if lacks else {}
        self._journal.write("end", phase=name, exit_code=code, **about)
        run = run_in(folder)
        state = "not begun" if run is None or why else run.status().state
        is_over = state == "done" or (state == "failed" and phase.order.may_fail)
        self._ended[name] = is_over and not why
        if not self._ended[name] and code == EXIT_OK:
            self._say(f"{name} is {state}; start again once it is done")
        return EXIT_OK if self._ended[name] else code

    def _require(self, phase: Phase) -> None:
        for one in phase.order.requires:
            path = self._path(phase, one)
            if not path.exists():
                raise UsageError(
                    f"it requires {path}, which is not there.",
                    hint=f"put the file there, or correct {phase.origin}.",
                )

    def _missing_product(self, phase: Phase) -> str:
        for name, one in phase.order.produces.items():
            path = self._path(phase, one)
            if not path.exists():
                folder = self._folder.phase(phase.name).path
                again = f"mv {shell_word(folder)} {shlex.quote(f'{folder}.before')}"
                return (
                    f"it is done, but has not produced {name}: there is no {path}.\n"
                    f"Hint: put the file there, or do {phase.name} anew: {again}, then start again."
                )
        return ""

    def _path(self, phase: Phase, text: str) -> Path:
        found = resolved(text, lambda at: value_of(self._experiment, self._folder, phase, at))
        return Path(os.path.expanduser(str(found)))  # noqa: PTH111 as flags have it

    def _say(self, text: str) -> None:
        if self._shown.level in ("info", "debug"):
            output.say(text)


def _says_the_same(parsed: Parsed) -> Callable[[Run], bool]:
    """Whether a run was begun by the same command, wherever its folder was then."""
    without = {*ONE_TIME, "options.run_dir"}

    def is_same(run: Run) -> bool:
        try:
            before = read_command(run.stored.argv)
        except MusterError:
            return False
        return before.argv(without=without) == parsed.argv(without=without)

    return is_same


# ---------------------------------------------------------------------- what would be done


def _show(
    experiment: Experiment, lines: Sequence[Line], folder: ExperimentFolder, *, is_json: bool
) -> None:
    """The settings that hold, each with where it is said."""
    found = {name: value for name, of in _FROM_ENVIRONMENT.items() if (value := variable(of))}
    known = {name: f"environment: {_FROM_ENVIRONMENT[name]}={found[name]}" for name in found}
    shown = [
        (phase, line, _settings(experiment, line, known))
        for phase, line in zip(experiment.phases, lines, strict=True)
    ]
    if is_json:
        output.say_json({
            "name": experiment.name, "path": str(folder.path),
            "phases": [
                {"name": phase.name, "after": needs(phase),
                 "command": line.parsed.argv(without=ONE_TIME),
                 "waits_for": [one.key for one in line.waits],
                 "settings": [one._asdict() for one in settings]}
                for phase, line, settings in shown
            ],
        })  # fmt: skip
        return
    for phase, line, settings in shown:
        if phase.name:
            after = f", after {', '.join(needs(phase))}" if needs(phase) else ""
            output.say(f"[phase.{phase.name}]{after}")
        output.say(command_text(line.parsed.argv(without=ONE_TIME)))
        output.table(["setting", "value", "from"], [list(one) for one in settings])
        output.say()


def _settings(
    experiment: Experiment, line: Line, environment: Mapping[str, str]
) -> list[Effective]:
    place = experiment.run_dir_origin
    return [
        one if one.origin else one._replace(origin=place) for one in effective(line, environment)
    ]
