"""``muster run``: parse, show, run, sum up.

The supervisor is started before anything else is imported: it needs the longest to get ready.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from muster.base.errors import MusterError, UsageError
from muster.cli.values import starts_ranks
from muster.gang.handle import SupervisorHandle, supervising
from muster.run.folder import RunFolder

if TYPE_CHECKING:
    from muster.api.slurm.gang import NodeStart, SlurmGang
    from muster.api.start.options import GangOptions
    from muster.cli.parse import Parsed
    from muster.gang.spec import Script

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


#: Of a sweep, whose workers need nothing but Muster.
_REFUSED = {
    "python": (
        "any interpreter can be the program.",
        "write muster run --no-python .venv/bin/python SCRIPT.",
    ),
    "memory": (
        "its ranks hold one model together, and none of them goes on without the others.",
        "limit all of them together: systemd-run --user --scope -p MemoryMax=64G muster run …",
    ),
}

#: What the help shows first.
_COMMON = (
    "is_module", "is_python", "devices", "gpu_ids", "max_restarts", "stall_timeout_s", "grace_s",
    "num_nodes", "node_rank", "master_addr", "master_port", "executor", "run_dir", "all_ranks",
    "restart", "dry_run", "quiet", "json",
)  # fmt: skip
_RUN_DIR = "The run folder. Default: runs/<name>-<time>."


def main(argv: list[str]) -> int:
    began = time.monotonic()
    is_wanted = starts_ranks(argv)
    with supervising(is_wanted=is_wanted, forks="--start=fork" in argv) as supervisor:
        return _run(flags_of_run(argv), ("muster", "run", *argv), supervisor, began)


def start(parsed: Parsed, typed: Sequence[str], node: NodeStart | None = None) -> int:
    """Do what the flags say. ``typed``: the command line that goes into the record; ``node``: of
    the job that this command, as it was handed in, has become.
    """
    began = time.monotonic()
    is_wanted = node is not None and not parsed.shown.dry_run
    forks = parsed.given("options").get("start") == "fork"
    with supervising(is_wanted=is_wanted, forks=forks) as supervisor:
        return _run(parsed, typed, supervisor, began, node)


def _run(
    parsed: Parsed,
    typed: Sequence[str],
    supervisor: SupervisorHandle | None,
    began: float,
    node: NodeStart | None = None,
) -> int:
    from muster.api.gangs.program import code_of_script, plan_script, run_script
    from muster.cli.gang import gang_audience, show_gang_plan, sum_up_gang

    script, options = read_run(parsed)
    shown = parsed.shown
    if node is not None:
        from muster.api.slurm.gang import options_on_node

        assert options.run_dir is not None
        folder, code = RunFolder(options.run_dir), code_of_script(script)
        options, typed = options_on_node(node, folder, options, code), node.argv
    if options.slurm is not None:
        from muster.cli.gang import run_on_slurm

        return run_on_slurm(_on_nodes(parsed, script, options, typed), parsed)
    if shown.dry_run:
        plan = plan_script(script, options)
        show_gang_plan(plan, shlex.join(parsed.program), is_json=shown.json)
        return 0
    audience = gang_audience(
        typed,
        all_ranks=shown.all_ranks,
        level=shown.level,
    )
    folder, ending = run_script(script, options, audience, supervisor=supervisor)
    seconds = time.monotonic() - began
    return sum_up_gang(folder.path, ending, seconds, is_quiet=shown.quiet, is_json=shown.json)


def slurm_gang(parsed: Parsed) -> SlurmGang:
    """What is sent to SLURM where the flags say so."""
    return _on_nodes(parsed, *read_run(parsed), parsed.argv())


def flags_of_run(argv: Sequence[str], more: Mapping[str, Any] = MappingProxyType({})) -> Parsed:
    """Our flags, which end at the first other word, and the program with its arguments. ``more``:
    groups of the command that this one is said to.
    """
    from muster.api.start.options import GangOptions
    from muster.cli.gang import gang_groups
    from muster.cli.options import Part
    from muster.cli.parse import parse_groups
    from muster.gang.spec import Script

    groups = {
        **more,
        "script": Part(of=Script, only=("is_module", "is_python")),
        **gang_groups(GangOptions(), _RUN_DIR),
    }
    return parse_groups(
        groups, argv, "run", _HELP, common=_COMMON, program="SCRIPT [ARGS]", refused=_REFUSED
    )


def read_run(parsed: Parsed) -> tuple[Script, GangOptions]:
    """What the flags mean."""
    from muster.cli.gang import gang_options
    from muster.cli.recipes import AGENTS, TASKS

    if not parsed.program:
        raise UsageError(
            "There is no script to run.",
            hint="write `muster run train.py …`; `muster run --help` has examples.",
        )
    given, name = parsed.given("script"), parsed.program[0]
    is_file = given.get("is_python", True) and not given.get("is_module")
    if is_file and (name in TASKS or name in AGENTS) and not Path(name).exists():
        raise UsageError(f"{name} is a recipe, and no script.", hint=f"write: muster train {name}")
    if given.get("is_module") and not given.get("is_python", True):
        raise UsageError("-m and --no-python contradict each other.", hint="give one of them.")
    script = parsed.make("script", path=parsed.program[0], args=parsed.program[1:])
    return script, gang_options(parsed)


def _on_nodes(
    parsed: Parsed, script: Script, options: GangOptions, typed: Sequence[str]
) -> SlurmGang:
    from muster.api.gangs.program import check_script, check_there, code_of_script
    from muster.api.gangs.work import GangWork
    from muster.cli.gang import gang_on_slurm

    check_there(script)
    given = options.run_dir
    folder = RunFolder(given) if given else _folder_of_job(script, options)
    check_script(folder, script, options)
    work = GangWork(folder=folder, program=script, code=code_of_script(script))
    return gang_on_slurm(work, options, parsed, typed)


def _folder_of_job(script: Script, options: GangOptions) -> RunFolder:
    """The folder of the job that means the same, whichever muster has named it."""
    from muster.api.gangs.program import folder_for_job, handed_in_here, what_decides

    for folder, argv in handed_in_here(script):
        with suppress(MusterError):  # a flag that there is no more
            other, how = read_run(flags_of_run(argv[2:]))
            is_same = what_decides(other, how) == what_decides(script, options)
            if is_same and how.run_dir is None:
                return folder
    return folder_for_job(script, options)
