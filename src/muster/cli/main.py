"""The command line: a table of commands, each imported when it is used."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from muster.base.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE, MusterError, UnknownNameError
from muster.base.signals import Interrupted, listening, stop_code
from muster.cli import output
from muster.cli.streams import ReaderGone, steady

#: name → ("module:function", what it does). The function takes the arguments and returns the
#: exit code.
COMMANDS: dict[str, tuple[str, str]] = {
    "sweep": (
        "muster.cli.commands.sweep:main",
        "run a function or a command once per setting and seed, on every device",
    ),
    "run": (
        "muster.cli.commands.run:main",
        "run a program on many devices in lock-step, as torchrun does",
    ),
    "map": (
        "muster.cli.commands.map:main",
        "put a data set through model stages, every record exactly once",
    ),
    "train": ("muster.cli.commands.train:main", "train one model on every device"),
    "verify": (
        "muster.cli.commands.verify:main",
        "compare a task's gradients on one rank, on several, with accumulation",
    ),
    "launch": ("muster.cli.commands.launch:main", "be asked, and led to the right command"),
    "plan": (
        "muster.cli.commands.plan:main",
        "predict step time, speed-up, memory, energy and cost",
    ),
    "slurm-script": (
        "muster.cli.commands.slurm_script:main",
        "write the batch script of a job for SLURM, to edit it",
    ),
    "collect": (
        "muster.cli.commands.collect:main",
        "bring the results of a SLURM array's elements together",
    ),
    "resume": ("muster.cli.commands.resume:main", "continue a run where it stopped"),
    "retry": ("muster.cli.commands.resume:retry", "run the failed tasks of a run again"),
    "list": ("muster.cli.commands.look:list_runs", "the runs here, the newest first"),
    "status": ("muster.cli.commands.look:status", "how far a run is, also while it runs"),
    "logs": ("muster.cli.commands.look:logs", "what a task printed"),
    "errors": ("muster.cli.commands.look:errors", "the failures of a run, grouped by cause"),
    "export": ("muster.cli.commands.look:export", "write the table of a run to a file"),
    "report": (
        "muster.cli.commands.report:main",
        "a run of any kind on one page, with its figures",
    ),
    "cancel": ("muster.cli.commands.look:cancel", "cancel what has not ended"),
    "monitor": ("muster.cli.commands.monitor:main", "what GPUs and host do, now or in a run"),
    "doctor": ("muster.cli.commands.doctor:main", "does this machine work, and how fast is it"),
    "devices": ("muster.cli.commands.devices:main", "the GPUs of this machine and who uses them"),
}

#: What is all about what it prints; the others do something, and go on when nobody reads them.
_LOOKING = {"list", "status", "logs", "errors", "plan", "devices", "monitor"}

#: What goes on when the same command is given again.
_GOES_ON = ("sweep", "map", "train", "resume", "retry")

_USAGE = """\
Usage: muster COMMAND [OPTIONS]

Run a PyTorch workload on every GPU you have: resumable, measured, never silently wrong.

Commands:
{commands}

Examples:
  muster sweep train.py:run --grid lr=1e-3,1e-2 --seeds 10
  muster sweep --grid lr=1e-3,1e-2 --seeds 3 -- python train.py --lr {{lr}} --seed {{seed}}
  muster sweep ssm --num-seeds 4 --student-dims 16 32 64
  muster run --gpus 4 train.py --lr 1e-3
  muster status RUN

Exit codes: 0 all good, 1 something failed, 2 wrong usage, 3 the set-up is broken, 75 saved and
asking to be started again, 130 interrupted (what is finished is saved; the same command continues).

`muster COMMAND --help` explains a command."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the ``muster`` program; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    # Behind `--` is a command that `monitor` runs.
    only_looks = (
        not words or words[0] not in COMMANDS or (words[0] in _LOOKING and "--" not in words)
    )
    with steady(is_vital=only_looks):
        try:
            if not words or words[0] not in (*_GOES_ON, "run"):
                return _obey(words)
            with listening(may_wait=False):
                return _obey(words)
        except MusterError as error:
            output.complain(str(error))
            return error.exit_code
        except KeyboardInterrupt as error:
            output.complain("Interrupted; everything finished is saved.")
            if isinstance(error, Interrupted) and words[0] in _GOES_ON:
                return stop_code(error.number)
            return EXIT_INTERRUPTED
        except ReaderGone:
            return EXIT_OK


def _obey(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        output.say(_usage())
        return EXIT_OK if words else EXIT_USAGE
    if words[0] in ("-V", "--version"):
        from muster import __version__

        output.say(f"muster {__version__}")
        return EXIT_OK
    return _run(words[0], words[1:])


def _run(command: str, rest: list[str]) -> int:
    if command not in COMMANDS:
        raise UnknownNameError("command", command, COMMANDS)
    module, _, function = COMMANDS[command][0].partition(":")
    result: int = getattr(importlib.import_module(module), function)(rest)
    return result


def _usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items()]
    return _USAGE.format(commands="\n".join(lines))


if __name__ == "__main__":
    sys.exit(main())
