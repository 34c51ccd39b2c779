"""``muster slurm-script``: a batch script as a file, for people who edit it."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from muster.base.atomic_files import explain_os_error, write_atomic
from muster.base.errors import EXIT_OK, UnknownNameError, UsageError
from muster.base.flags import Flag
from muster.cli import output
from muster.cli.main import COMMANDS, read_command
from muster.cli.parse import parse_groups

#: command → the function that says what its flags would send.
_SCRIPTS = {
    "train": "muster.cli.commands.train:slurm_gang",
    "run": "muster.cli.commands.run:slurm_gang",
    "sweep": "muster.cli.commands.sweep:slurm_array",
}
_HELP = """Write the batch script that `muster train … --on slurm` would send, to edit and send it.

COMMAND is train, run or sweep with its own words, and --output may stand among its flags.

Examples:
  muster slurm-script train har --nodes 2 --gpus 4 --time 4:00:00
  muster slurm-script --output job.sh run --gpus 4 train.py --lr 1e-3
  muster slurm-script --output job.sh sweep train.py:run --seeds 100 --array 100 --time 1:00:00
"""


@dataclass(frozen=True, kw_only=True)
class FileFlags:
    """Where the script goes."""

    output: Annotated[Path | None, Flag(metavar="FILE", aliases=("o",))] = None
    """Write the script there, and the record of what it runs; else it is printed."""


def main(argv: list[str]) -> int:
    said = parse_groups({"file": FileFlags}, argv, "slurm-script", _HELP, program="COMMAND …")
    command, words = (*said.program[:1], "")[0], said.program[1:]
    if command in COMMANDS and command not in _SCRIPTS:
        raise UsageError(
            f"muster {command} has no script of its own to send; {', '.join(_SCRIPTS)} have.",
            hint="with --on slurm it sends its workers' jobs itself." * (command == "map") or None,
        )
    if command not in _SCRIPTS:
        raise UnknownNameError("command", command, _SCRIPTS)
    parsed = read_command(["muster", command, *words], {"file": FileFlags})
    if (on := parsed.given("options").get("executor", "slurm")) != "slurm":
        raise UsageError(f"--on {on} and a script for SLURM contradict each other.")
    parsed.shown.refuse_detach("a job is nobody's foreground", "leave it out.")
    target = said.file.output or parsed.file.output
    job = _job(command, parsed.saying(("file.output",), executor="slurm"))
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


def _job(command: str, parsed: Any) -> Any:
    module, _, function = _SCRIPTS[command].partition(":")
    return getattr(importlib.import_module(module), function)(parsed)
