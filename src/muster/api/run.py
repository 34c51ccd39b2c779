"""``muster run``: a program that works under torchrun, unchanged, on every device."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

from muster.api.gangs import (
    GangAudience,
    GangEnding,
    GangPlan,
    Script,
    plan_gang,
    run_gang,
)
from muster.api.options import GangOptions
from muster.base.code import Code, check_same_code, code_of_command
from muster.base.errors import TargetError
from muster.farm.canonical import name_with_hash
from muster.gang.launch import SupervisorHandle
from muster.run.folder import RunFolder
from muster.run.record import read_run


def plan_script(script: Script, options: GangOptions, run_dir: Path | None = None) -> GangPlan:
    """What would be run, where. Changes nothing."""
    check_there(script)
    name = f"{script.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = RunFolder(run_dir or Path("runs") / name)
    check_script(folder, script, options)
    return plan_gang(folder, script, options)


def run_script(
    script: Script,
    options: GangOptions,
    audience: GangAudience,
    *,
    run_dir: Path | None = None,
    supervisor: SupervisorHandle | None = None,
) -> tuple[RunFolder, GangEnding]:
    """Run the script on every device to its end; see ``run_gang`` for what it promises."""
    check_there(script)
    plan_gang(
        RunFolder(run_dir or Path("runs")), script, options
    )  # complain before a folder is made
    if run_dir is not None:
        check_script(RunFolder(run_dir), script, options)
    folder = RunFolder(run_dir) if run_dir else _new_folder(script.name, options.node_rank)
    code = code_of_script(script)
    return folder, run_gang(folder, script, options, audience, code=code, supervisor=supervisor)


def code_of_script(script: Script) -> Code:
    if not script.is_python:
        return code_of_command([script.path, *script.args])
    return code_of_command(["python", *["-m"] * script.is_module, script.path, *script.args])


def check_script(folder: RunFolder, script: Script, options: GangOptions) -> None:
    """PlanMismatchError where a program of another code has been run in this folder."""
    if options.restart or options.allow_changed_code or not folder.exists():
        return
    stored = read_run(folder)
    if stored.kind == "run" and any(folder.logs.glob("rank-*.log")):
        check_same_code(stored.code, code_of_script(script), folder.path)


def folder_for_job(script: Script, words: Sequence[str]) -> RunFolder:
    """The run folder of a job that runs ``script``: the same for the same command from here."""
    check_there(script)
    digest = sha256(json.dumps([str(Path.cwd()), *words]).encode()).hexdigest()
    return RunFolder(Path("runs") / name_with_hash(script.name, digest))


def check_there(script: Script) -> None:
    """TargetError where there is no such script."""
    if script.is_python and not script.is_module and not Path(script.path).exists():
        raise TargetError(
            f"There is no script {script.path} (in {Path.cwd()}).",
            hint="for a module write -m package.module, for another program --no-python.",
        )


def _new_folder(name: str, node_rank: int) -> RunFolder:
    """``runs/<name>-<time>``, with a number behind it while somebody else has that name."""
    stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}" + (f"-node{node_rank}" if node_rank else "")
    number = 1
    while True:
        path = Path("runs") / (stem if number == 1 else f"{stem}-{number}")
        try:
            path.mkdir(parents=True)
            return RunFolder(path)
        except FileExistsError:
            number += 1
