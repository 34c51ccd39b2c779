"""The command line: a table of commands, each imported when it is used."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from muster.base.errors import (
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_USAGE,
    MusterError,
    SetupError,
    UnknownNameError,
)
from muster.base.late_modules import imported_to_stay
from muster.base.signals import Interrupted, listening, stop_code
from muster.cli import output
from muster.cli.streams import ReaderGone, steady

if TYPE_CHECKING:
    from muster.cli.parse import Parsed

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
        "muster.cli.commands.train:verify",
        "compare a task's gradients on one rank, on several, with accumulation",
    ),
    "start": (
        "muster.cli.commands.start:main",
        "start what an experiment file says, or go on with it",
    ),
    "init": (
        "muster.cli.commands.init:main",
        "write an experiment file, of a command, of a run or of answers",
    ),
    "launch": ("muster.cli.commands.launch:main", "answer a few questions and get the command"),
    "plan": (
        "muster.cli.commands.plan:main",
        "predict step time, speed-up, memory, energy and cost",
    ),
    "slurm-script": (
        "muster.cli.commands.slurm:slurm_script",
        "write the batch script of a job for SLURM, to edit it",
    ),
    "collect": (
        "muster.cli.commands.tables:collect_array",
        "bring the results of a SLURM array's elements together",
    ),
    "resume": ("muster.cli.commands.resume:main", "continue a run where it stopped"),
    "retry": ("muster.cli.commands.resume:retry", "run the failed tasks of a run again"),
    "add": (
        "muster.cli.commands.add:main",
        "add tasks to a sweep, also while it goes on",
    ),
    "list": ("muster.cli.commands.look:list_runs", "list the runs here, the newest first"),
    "status": ("muster.cli.commands.look:status", "show a run's progress, also while it runs"),
    "attach": (
        "muster.cli.commands.attach:main",
        "show the live screen of a run that goes on elsewhere, until it ends",
    ),
    "wait": ("muster.cli.commands.attach:wait", "wait until runs have ended"),
    "best": ("muster.cli.commands.tables:best", "show the best trials of a search"),
    "why": (
        "muster.cli.commands.logs:show_why",
        "say why a run or a task stands as it does, and what to try",
    ),
    "logs": ("muster.cli.commands.logs:main", "show what a task or a rank printed"),
    "errors": ("muster.cli.commands.look:errors", "show the failures of a run, grouped by cause"),
    "export": ("muster.cli.commands.tables:export", "write the table of a run to a file"),
    "metrics": (
        "muster.cli.commands.tables:metrics",
        "show what a run has logged over time, or write it to a file",
    ),
    "report": (
        "muster.cli.commands.pages:report",
        "put a run of any kind on one page, with its figures",
    ),
    "web": ("muster.cli.commands.pages:web", "look at runs in a browser, live"),
    "track": (
        "muster.cli.commands.tables:track_run",
        "send a run to trackers: W&B, MLflow, trackio, TensorBoard",
    ),
    "cancel": (
        "muster.cli.commands.attach:cancel",
        "cancel what has not ended; what is finished is kept",
    ),
    "monitor": (
        "muster.cli.commands.monitor:main",
        "watch GPUs and host, or look at what a run recorded",
    ),
    "doctor": (
        "muster.cli.commands.doctor:main",
        "check whether this machine works, and how fast it is",
    ),
    "devices": (
        "muster.cli.commands.devices:main",
        "list the GPUs of this machine and who uses them; change those of a run",
    ),
    "hosts": (
        "muster.cli.commands.hosts:main",
        "check whether machines reached by SSH can run a sweep together",
    ),
    "mcp": ("muster.cli.commands.mcp:main", "serve Muster to an agent, as tools over stdio"),
    "queue": (
        "muster.cli.commands.devices:queue",
        "show who waits for this machine's GPUs, in which order, and who has them",
    ),
    "completion": (
        "muster.cli.commands.completion:main",
        "make bash, zsh or fish complete what is typed",
    ),
}

#: command → the function that reads its flags, of those that make a run.
_READERS = {
    "sweep": "muster.cli.commands.sweep:flags_of_sweep",
    "map": "muster.cli.map_flags:flags_of_map",
    "train": "muster.cli.commands.train:flags_of_train",
    "run": "muster.cli.commands.run:flags_of_run",
}

#: What ends its own flags where the name of a program stands, which may have the same ones.
PROGRAM_FOLLOWS = ("run",)

#: What is all about what it prints; the others do something, and go on when nobody reads them.
_LOOKING = {
    "list", "status", "attach", "why", "best", "logs", "errors", "metrics", "plan",
    "devices", "monitor", "queue", "hosts", "completion", "slurm-script",
}  # fmt: skip
#: Flags by which they do more.
_DO_MORE = {
    "devices": {"release", "add", "only"},
    "slurm-script": {"output", "o"},
}

#: What goes on when the same command is given again.
_GOES_ON = ("sweep", "map", "train", "start", "resume", "retry", "add")
#: What ends its work in order when it is asked to by a signal.
_LISTENS = (*_GOES_ON, "run")

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

`muster help COMMAND` explains a command; `muster COMMAND --help-all` shows all of its flags."""


def main(argv: Sequence[str] | None = None, *, may_detach: bool = True) -> int:
    """Entry point of the ``muster`` program; returns the exit code. ``may_detach``: whether
    --detach starts another process, which this is not yet.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    only_looks = not words or words[0] not in COMMANDS or _only_looks(words)
    with steady(is_vital=only_looks), output.only_json() if _wants_json(words) else nullcontext():
        try:
            if not words or words[0] not in _LISTENS:
                return _obey(words)
            with listening(may_wait=False):
                if may_detach and "--detach" in words:
                    from muster.cli import detached

                    if ours := detached.asked(words):
                        return detached.start(words, ours)
                return _obey(words)
        except MusterError as error:
            output.complain(str(error))
            return error.exit_code
        except PermissionError as error:
            if error.filename is None:  # not of a file
                raise
            closed = _closed(os.fsdecode(error.filename))
            output.complain(str(closed))
            return closed.exit_code
        except FileNotFoundError:
            if (gone := _without_folder()) is None:
                raise
            output.complain(str(gone))
            return gone.exit_code
        except KeyboardInterrupt as error:
            output.complain("Interrupted; everything finished is saved.")
            if isinstance(error, Interrupted) and words[0] in _GOES_ON:
                return stop_code(error.number)
            return EXIT_INTERRUPTED
        except ReaderGone:
            return EXIT_OK


def _closed(path: str) -> SetupError:
    """Of the run or the file of another user: whose it is says the nearest place that shows it."""
    from pathlib import Path

    from muster.devices.tickets import user_name

    for place in (Path(path), *Path(path).parents):
        with suppress(OSError):
            whose = f"{place} belongs to {user_name(place.stat().st_uid)}"
            break
    else:
        whose = "it belongs to another user"
    return SetupError(
        f"Cannot use {path}: Permission denied.",
        hint=f"{whose}, who can open it to others (chmod).",
    )


def _without_folder() -> SetupError | None:
    """The error where the folder that this process works in has been removed."""
    try:
        os.getcwd()  # noqa: PTH109  (asked for its error alone)
    except FileNotFoundError:
        return SetupError(
            "The folder that you are in has been removed.",
            hint='change into one that is there; if it was made anew: cd "$PWD".',
        )
    return None


def _wants_json(words: list[str]) -> bool:
    """Where a program follows, what its ranks print is shown."""
    if "--json" not in words or words[0] in PROGRAM_FOLLOWS:
        return False
    from muster.base.flags import kind_of_word

    return "--json" in takewhile(lambda word: kind_of_word(word) != "end", words)


def _only_looks(words: list[str]) -> bool:
    """Whether what it prints is all that it does. Behind `--` is a command that `monitor` runs."""
    from muster.base.flags import own_words

    command, own = words[0], own_words(words)
    flags = {
        word.lstrip("-").partition("=")[0].replace("_", "-") for word in own if word[:1] == "-"
    }
    if "dry-run" in flags and command not in PROGRAM_FOLLOWS:
        return True
    if command == "launch":
        return "print" in flags
    is_all = len(own) == len(words) or command != "monitor"
    return command in _LOOKING and is_all and not flags & _DO_MORE.get(command, set())


def _obey(words: list[str]) -> int:
    if words[:1] == ["help"] and len(words) > 1:
        words = [*words[1:], "--help"]
    if not words or words[0] in ("-h", "--help", "--help-all", "help"):
        output.say(_usage())
        return EXIT_OK if words else EXIT_USAGE
    if words[0] in ("-V", "--version"):
        from muster import __version__

        output.say(f"muster {__version__}")
        return EXIT_OK
    return run_command(words[0], words[1:])


def run_command(command: str, rest: list[str]) -> int:
    """Do what a command says; returns its exit code, and raises what it raises."""
    if command not in COMMANDS:
        raise UnknownNameError("command", command, COMMANDS)
    name, _, function = COMMANDS[command][0].partition(":")
    result: int = getattr(imported_to_stay(name), function)(rest)
    return result


def read_command(argv: Sequence[str], more: Mapping[str, Any] | None = None) -> Parsed:
    """The options that a stored command line (``muster train digits --lr 1``) means. ``more``:
    further groups, of the command that this one is said to.

    ``Parsed.argv`` is the way back. Raises UsageError for what is no command that makes a run, and
    whatever the command itself refuses.
    """
    name = argv[1] if len(argv) > 1 else ""
    if name not in _READERS:
        raise UnknownNameError("command that makes a run", name, _READERS)
    module, _, function = _READERS[name].partition(":")
    parsed: Parsed = getattr(importlib.import_module(module), function)(
        list(argv[2:]), **({} if more is None else {"more": more})
    )
    return parsed


def _usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items()]
    return _USAGE.format(commands="\n".join(lines))


if __name__ == "__main__":
    sys.exit(main())
