"""``muster init``: write an experiment file, of a command, of a run or of answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from muster.api.look.listing import find_run
from muster.api.runs import Run
from muster.api.sweeps.plans import stored_options
from muster.base.atomic_files import explain_os_error
from muster.base.errors import EXIT_INTERRUPTED, UsageError
from muster.base.flags import Flag
from muster.base.settings import read_settings
from muster.base.shown_text import count, shell_word
from muster.cli import output
from muster.cli.commands.launch import ANSWERS, answers_in, ask_all, make_asker
from muster.cli.experiment_words import file_of
from muster.cli.flags import ONE_TIME
from muster.cli.options import Part, options_of
from muster.cli.parse import parse_groups
from muster.cli.questions import LaunchFlags, Machine, command_of
from muster.cli.values import texts
from muster.devices.discovery import discover
from muster.farm.canonical import decode
from muster.farm.ledger.read import LedgerReader

_HELP = """Write an experiment file for `muster start`.

It holds what a command line says (behind --), what a run was begun with (--from), or your answers
to some questions; what is given as a flag is not asked.

Examples:
  muster init experiment.toml -- sweep train.py:run --grid lr=1e-3,1e-2 --seeds 3
  muster init again.toml --from runs/train-1a2b3c
  muster init --kind train --target digits --devices cpu:2
"""


@dataclass(frozen=True, kw_only=True)
class _Init:
    """Which file, and what it says."""

    file: Annotated[Path, Flag(is_positional=True)] = Path("experiment.toml")
    """The file, which ends in .toml."""
    from_: Annotated[str, Flag(name="from", metavar="RUN")] = ""
    """Write what this run was begun with; starting the file does the same tasks again."""


def main(argv: list[str]) -> int:
    groups = {"init": _Init, "launch": Part(of=LaunchFlags, only=("kind", "target", "args")),
              **ANSWERS}  # fmt: skip
    parsed = parse_groups(groups, argv, "init", _HELP, takes_rest=True)
    flags: _Init = parsed.init
    answered = [one for one in parsed.said if one.option.group != "init"]
    if bool(flags.from_) + bool(parsed.program) + bool(answered) > 1:
        raise UsageError(
            "--from, a command behind -- and answers each say what the file is for.",
            hint="give one of them.",
        )
    if flags.file.suffix != ".toml":
        raise UsageError(f"{flags.file}: muster init writes TOML.", hint="name a .toml file.")
    if flags.file.exists():
        raise UsageError(f"{flags.file} is there already.", hint="name another file.")
    if flags.from_:
        text = _of_run(find_run(flags.from_), flags.file)
    elif parsed.program:
        words = [*parsed.program]
        text = file_of(["muster", *words[words[0] == "muster" :]], "An experiment.")
    else:
        asker = make_asker()
        settings = read_settings()
        machine = Machine(inventory=discover(settings), num_cores=settings.cpu_count)
        try:
            answers = ask_all(machine, answers_in(parsed), asker)
        except (KeyboardInterrupt, EOFError):
            output.remark("Nothing was written.")
            return EXIT_INTERRUPTED
        text = file_of(command_of(answers).argv(), "An experiment.")
    _write(flags.file, text)
    output.say(f"wrote {flags.file}; start it with: muster start {shell_word(flags.file)}")
    return 0


def _write(path: Path, text: str) -> None:
    try:
        data = text.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{path}: a word of the command is not UTF-8, as TOML must be.") from None
    is_ours = False
    try:
        with path.open("xb") as file:
            is_ours = True
            file.write(data)
    except OSError as error:
        if is_ours:
            with suppress(OSError):
                path.unlink()
        raise explain_os_error(error, "write", path, other="name another file") from error


def _of_run(run: Run, file: Path) -> str:
    stored = run.stored
    folder = "" if file.absolute().parent == Path(stored.cwd) else stored.cwd
    why = f"What {run.folder.name} was begun with."
    if stored.argv:
        return file_of(stored.argv, why, folder)
    if "target" not in stored.fixed or stored.is_search:  # it is no sweep, or chooses by itself
        raise UsageError(
            f"{run.path} was made by a call of {stored.call} in a program, and its record does not "
            "name all that the call was given.",
            hint="give that call again, or write the file: muster init FILE -- COMMAND …",
        )
    return file_of(_called(run, file), f"{why} Its settings are in {file.stem}.jsonl.", folder)


def _called(run: Run, file: Path) -> list[str]:
    """The command line of a sweep that was called from Python: its settings go into a list."""
    run.expect_tasks()
    listed = file.with_suffix(".jsonl")
    target = run.stored.targets[0]
    with LedgerReader(run.folder.ledger) as ledger:
        rows = [decode(row.payload) for row in ledger.tasks()]
    seeds = {json.dumps({k: v for k, v in row.items() if k != "seed"}) for row in rows}
    if seeds == {"{}"}:
        named = ",".join(str(row["seed"]) for row in rows if "seed" in row)
        words = ["--seeds", f"{named},"] if named else []
    else:
        _write(listed, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        words = ["--list", str(listed.absolute())]
        output.remark(f"wrote {listed}: {count(len(rows), 'setting')}")
    words += _options(run)
    if target["kind"] == "command":
        more = ["--shell"] if target["shell"] else []
        more += [f"--metrics-from={target['metrics_from']}"] if target["metrics_from"] else []
        return ["muster", "sweep", *words, *more, "--", *target["argv"]]
    return ["muster", "sweep", str(target["name"]), *words]


def _options(run: Run) -> Sequence[str]:
    """What of the options was not left as it is."""
    stored, words = stored_options(run), list[str]()
    for option in options_of("options", type(stored)):
        value = stored
        for name in option.path:
            value = getattr(value, name)
        own = option.path[-1] in ("run_dir", "name") or f"options.{option.path[-1]}" in ONE_TIME
        if value == option.default or own or value is None:
            continue
        if option.arity == 0:
            words.append(f"--{'' if value else 'no-'}{option.name}")
        else:
            said = ",".join(texts(value)) if option.arity == 1 else texts(value)
            words += [f"--{option.name}", *([said] if isinstance(said, str) else said)]
    return words
