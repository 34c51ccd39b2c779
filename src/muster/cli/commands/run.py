"""``muster run``: parse, show, run, sum up.

The supervisor is started before anything else is imported: it needs the longest to get ready.
"""

from __future__ import annotations

import dataclasses
import shlex
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from muster.api.early import SupervisorHandle, start_supervisor
from muster.base.errors import UsageError
from muster.cli.on_slurm import wants_slurm

if TYPE_CHECKING:
    from muster.api.gangs import GangOptions, Script
    from muster.api.slurm_gang import SlurmGang

_HELP = """Run a program on many devices in lock-step, one rank per device, as torchrun does.

SCRIPT is a Python file; with -m a module; with --no-python any program. Everything after it
belongs to it. It finds the variables that torchrun sets (RANK, LOCAL_RANK, WORLD_SIZE, …), so any
program that works under torchrun runs unchanged.

Examples:
  muster run --gpus 4 train.py --lr 1e-3
  muster run --devices cpu:2 -m package.train --epochs 3
  muster run --on slurm --nodes 2 --gpus 4 --time 4:00:00 train.py
  muster run --nodes 2 --node-rank 0 --master-addr HOST --master-port 29400 train.py
"""


def main(argv: list[str]) -> int:
    began = time.monotonic()
    words, program = split(argv)
    with ExitStack() as stack:
        supervisor = None
        helps = any(word in ("-h", "--help", "--dry-run", "--dry_run") for word in words)
        if program and not helps and not wants_slurm(words):
            supervisor = stack.enter_context(start_supervisor(forks=_forks(words)))
        return _run(words, program, argv, supervisor, began)


def split(argv: list[str]) -> tuple[list[str], list[str]]:
    """Our flags, and the program with its arguments, which starts at the first other word."""
    position = 0
    while position < len(argv):
        word = argv[position]
        if word == "--":
            return argv[:position], argv[position + 1 :]
        if not word.startswith("-"):
            return argv[:position], argv[position:]
        position += 2 if "=" not in word and _flag(word) not in SWITCHES else 1
    return argv, []


#: Flags without a value. A test compares them with the flags as they are.
SWITCHES = {
    "m", "module", "no-python", "force", "no-multi-gpu", "all-ranks", "quiet", "json", "dry-run",
    "h", "help", "no-force", "no-all-ranks", "no-quiet", "no-json", "no-dry-run", "no-module",
    "no-wait", "allow-changed-code", "restart",
}  # fmt: skip


def _flag(word: str) -> str:
    return word.lstrip("-").replace("_", "-")


def _forks(words: list[str]) -> bool:
    return "--start=fork" in words or "fork" in words


def _run(
    words: list[str],
    program: list[str],
    argv: list[str],
    supervisor: SupervisorHandle | None,
    began: float,
) -> int:
    from muster.api.run import plan_script, run_script
    from muster.cli.gang_screen import gang_audience, show_gang_plan, sum_up_gang

    flags, script, options = _asked(words, program)
    shown = flags.run
    if options.slurm is not None:
        from muster.cli.slurm_gang import run_on_slurm

        gang = _on_nodes(words, program, flags, script, options)
        return run_on_slurm(gang, flags, ["muster", "run", *argv])
    if shown.dry_run:
        plan = plan_script(script, options, shown.run_dir)
        show_gang_plan(plan, shlex.join(program), is_json=shown.json)
        return 0
    audience = gang_audience(
        ["muster", "run", *argv],
        all_ranks=shown.all_ranks,
        level=shown.level,
    )
    folder, ending = run_script(
        script, options, audience, run_dir=shown.run_dir, supervisor=supervisor
    )
    seconds = time.monotonic() - began
    return sum_up_gang(folder.path, ending, seconds, is_quiet=shown.quiet, is_json=shown.json)


def slurm_gang(argv: list[str]) -> SlurmGang:
    """What ``muster run ARGV --on slurm`` would send."""
    words, program = split(argv)
    flags, what, options = _asked(words, program)
    assert options.slurm is not None
    return _on_nodes(words, program, flags, what, options)


def _asked(words: list[str], program: list[str]) -> tuple[Any, Script, GangOptions]:
    from muster.cli.flags import DeviceFlags, EarlierWorkFlags
    from muster.cli.gang_flags import (
        GangFlags,
        GangRunFlags,
        NodeFlags,
        PlaceFlags,
        ScriptFlags,
        gang_options_from,
    )
    from muster.cli.parse import bundle, parse

    groups: dict[str, type] = {
        "script": ScriptFlags,
        "place": PlaceFlags,
        "device": DeviceFlags,
        "gang": GangFlags,
        "node": NodeFlags,
        "earlier": EarlierWorkFlags,
        "run": GangRunFlags,
    }
    flags: Any = parse(bundle("Run", groups), words, "run", _HELP)
    if not program:
        raise UsageError(
            "There is no script to run.",
            hint="write `muster run train.py …`; `muster run --help` has examples.",
        )
    script = _script(flags.script, program)
    options = gang_options_from(flags.device, flags.gang, flags.node, flags.place, flags.earlier)
    return flags, script, options


def _on_nodes(
    words: list[str], program: list[str], flags: Any, script: Script, options: GangOptions
) -> SlurmGang:
    from muster.api.run import check_script, folder_for_job
    from muster.api.slurm_gang import SlurmGang
    from muster.cli.slurm_gang import node_command, words_for_nodes
    from muster.run.folder import RunFolder

    given, request = flags.run.run_dir, options.slurm
    assert request is not None
    decisive = [str(request.num_nodes), *words_for_nodes(words), *program]
    folder = RunFolder(given) if given else folder_for_job(script, decisive)
    check_script(folder, script, options)
    command = node_command(["run"], words, folder)
    command = dataclasses.replace(command, rest=[*command.rest, "--", *program])
    return SlurmGang(
        folder=folder, command=command, request=request, kind="run", restart=options.restart
    )


def _script(flags: Any, program: list[str]) -> Script:
    from muster.api.gangs import Script

    if flags.module and flags.no_python:
        raise UsageError("-m and --no-python cannot be combined.", hint="leave one of them out.")
    return Script(
        path=program[0],
        args=tuple(program[1:]),
        is_module=flags.module,
        is_python=not flags.no_python,
    )
