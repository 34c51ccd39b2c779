"""``muster slurm-script``: a batch script as a file, for people who edit it."""

from __future__ import annotations

import importlib
from pathlib import Path

from muster.base.atomic_files import explain_os_error, write_atomic
from muster.base.errors import EXIT_OK, EXIT_USAGE, UnknownNameError, UsageError
from muster.cli import output
from muster.cli.commands.run import flags_of_run
from muster.cli.main import COMMANDS
from muster.cli.parse import wants_slurm

#: command → the function that takes its words and says what would be sent.
_SCRIPTS = {
    "train": "muster.cli.commands.train:slurm_gang",
    "run": "muster.cli.commands.run:slurm_gang",
    "sweep": "muster.cli.commands.sweep:slurm_array",
}
_NAMES = ("--output", "-o")
_HELP = """Usage: muster slurm-script [--output FILE] train|run|sweep … [--output FILE]

Write the batch script that `muster train … --on slurm` would send, to edit it and send it with
sbatch. The words after the command are those of the command. Without --output it is printed.

Examples:
  muster slurm-script train har --nodes 2 --gpus 4 --time 4:00:00
  muster slurm-script --output job.sh run --gpus 4 train.py --lr 1e-3
  muster slurm-script --output job.sh sweep train.py:run --seeds 100 --array 100 --time 1:00:00
"""


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "--help-all"):
        output.say(_HELP)
        return EXIT_OK if argv else EXIT_USAGE
    target, words = _output(argv)
    if words and words[0] in COMMANDS and words[0] not in _SCRIPTS:
        raise UsageError(
            f"muster {words[0]} has no script of its own to send; {', '.join(_SCRIPTS)} have.",
            hint="with --on slurm it sends its workers' jobs itself." * (words[0] == "map") or None,
        )
    if not words or words[0] not in _SCRIPTS:
        raise UnknownNameError("command", words[0] if words else "", _SCRIPTS)
    command, words = words[0], words[1:]
    if target is None:
        target, words = output_among(command, words)
    if not wants_slurm(words):
        words = ["--on", "slurm", *words]
    module, _, function = _SCRIPTS[command].partition(":")
    job = getattr(importlib.import_module(module), function)(words)
    text = job.script()
    if target is None:
        output.say(text.rstrip("\n"))
        output.remark("--output FILE writes the record that it runs as well; this has written none")
        return EXIT_OK
    try:
        place = job.make_ready()
        write_atomic(target, text.encode())
    except OSError as error:
        raise explain_os_error(error, "write the script", target) from error
    output.remark(f"{target}: send it with `sbatch {target}`; it prints to {place}")
    return EXIT_OK


def _output(argv: list[str]) -> tuple[Path | None, list[str]]:
    name, equals, value = argv[0].partition("=")
    if name not in _NAMES:
        return None, argv
    if equals:
        return Path(value), argv[1:]
    if len(argv) < 2:
        raise UsageError("--output needs the name of a file.")
    return Path(argv[1]), argv[2:]


def output_among(command: str, words: list[str]) -> tuple[Path | None, list[str]]:
    """--output among the flags of the command; in a program's own words it is the program's."""
    # The program of `run` begins behind its flags, which are read without --output.
    for position, word in enumerate(words):
        if word == "--":
            break
        if word.partition("=")[0] in _NAMES and not _in_program(command, words[:position]):
            target, rest = _output(words[position:])
            return target, [*words[:position], *rest]
    return None, words


def _in_program(command: str, before: list[str]) -> bool:
    """Whether the words ``before`` have begun the program of ``muster run``."""
    return command == "run" and bool(flags_of_run(before).program)
