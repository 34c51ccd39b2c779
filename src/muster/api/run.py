"""``muster run``: a program that works under torchrun, unchanged, on every device."""

from __future__ import annotations

import time
from pathlib import Path

from muster.api.gangs import (
    GangAudience,
    GangEnding,
    GangOptions,
    GangPlan,
    Script,
    new_folder,
    plan_gang,
    run_gang,
)
from muster.base.errors import TargetError
from muster.base.run_folder import RunFolder
from muster.gang.launch import AgentHandle


def plan_script(script: Script, options: GangOptions, run_dir: Path | None = None) -> GangPlan:
    """What would be run, where. Changes nothing."""
    _check_there(script)
    name = f"{script.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = RunFolder(run_dir or Path("runs") / name)
    return plan_gang(folder, script, options)


def run_script(
    script: Script,
    options: GangOptions,
    audience: GangAudience,
    *,
    run_dir: Path | None = None,
    agent: AgentHandle | None = None,
) -> tuple[RunFolder, GangEnding]:
    """Run the script on every device to its end; see ``run_gang`` for what it promises."""
    _check_there(script)
    plan_gang(
        RunFolder(run_dir or Path("runs")), script, options
    )  # complain before a folder is made
    folder = RunFolder(run_dir) if run_dir else new_folder(script.name, options.node_rank)
    return folder, run_gang(folder, script, options, audience, agent=agent)


def _check_there(script: Script) -> None:
    if script.is_python and not script.is_module and not Path(script.path).exists():
        raise TargetError(
            f"There is no script {script.path} (in {Path.cwd()}).",
            hint="for a module write -m package.module, for another program --no-python.",
        )
