"""``muster run``: a program that works under torchrun, unchanged, on every device."""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from muster.api.gangs.gang import GangPlan, plan_gang, run_gang
from muster.api.gangs.host_plan import HostsPlan
from muster.api.gangs.work import GangAudience, GangEnding, GangWork, Script
from muster.api.start.earlier_work import check_code
from muster.api.start.options import GangOptions
from muster.base.code import Code, code_of_command
from muster.base.codec import to_json
from muster.base.errors import PlanMismatchError, SetupError, TargetError, nearest
from muster.base.modules import Finder, Found, is_installed, read_source
from muster.base.shown_text import command_line, shell_word
from muster.gang.handle import SupervisorHandle
from muster.run.folder import RunFolder, default_root, folder_for, name_with_hash
from muster.run.record import plain_options, read_run
from muster.slurm.commands import read_job


def plan_script(script: Script, options: GangOptions) -> GangPlan | HostsPlan:
    """What would be run, where. It changes nothing.

    Raises TargetError where there is no such script, and what ``plan_gang`` raises.
    """
    check_there(script)
    _check_program(script, options)
    name = f"{script.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = RunFolder(options.run_dir or default_root() / name)
    check_script(folder, script, options)
    return plan_gang(GangWork(folder=folder, program=script), options)


def run_script(
    script: Script,
    options: GangOptions,
    audience: GangAudience,
    *,
    supervisor: SupervisorHandle | None = None,
) -> tuple[RunFolder, GangEnding]:
    """Run the script on every device to its end; see ``run_gang`` for what it promises.

    Raises TargetError where there is no such script, and what ``run_gang`` raises.
    """
    check_there(script)
    _check_program(script, options)
    place = options.run_dir
    nowhere = GangWork(folder=RunFolder(place or default_root()), program=script)
    if options.hosts is None:
        plan_gang(nowhere, options)  # refuse before a folder is made
    note = check_script(RunFolder(place), script, options) if place is not None else ""
    if note and not options.node_rank:  # nodes may share the folder
        audience.warn(note)
    folder = RunFolder(place) if place else _new_folder(script.name, options.node_rank)
    work = GangWork(folder=folder, program=script, code=code_of_script(script))
    try:
        ending = run_gang(work, options, audience, supervisor=supervisor)
    except BaseException:
        if place is None:
            with suppress(OSError):  # nothing is in it where it has not begun
                folder.path.rmdir()
        raise
    return folder, ending


def code_of_script(script: Script) -> Code:
    if not script.is_python:
        return code_of_command([script.path, *script.args])
    return code_of_command(["python", *["-m"] * script.is_module, script.path, *script.args])


def check_script(folder: RunFolder, script: Script, options: GangOptions) -> str:
    """Raise PlanMismatchError where this folder holds a run of the program with other code.

    Returns what to tell where it has run other words before, else "". That is no mistake: how a
    program is told to go on from what it has saved is its own affair.
    """
    if options.restart or not folder.exists() or not (stored := read_run(folder)).is_program:
        return ""
    before, after = _words(stored.spec.get("program")), _words(dataclasses.asdict(script))
    is_other = before != after and any(folder.logs.glob("rank-*.log"))
    try:
        check_code(folder, code_of_script(script), may_change=options.allow_changed_code)
    except PlanMismatchError as error:
        if not is_other:
            raise
        said = f"{folder.path} was made for another program: {before} -> {after}."
        raise PlanMismatchError(f"{said}\n{error}") from None
    if not is_other:
        return ""
    said = f"{folder.path} has run `{before}` before and runs `{after}` now: its logs hold both"
    return f"{said}; another --run-dir, or --restart, keeps them apart."


def _words(program: Any) -> str:
    """What the record of a program was typed as, behind Muster's own flags."""
    if not isinstance(program, dict):
        return ""
    module = ["-m"] if program.get("is_module") else []
    return command_line([*module, str(program.get("path")), *map(str, program.get("args") or ())])


def folder_for_job(script: Script, options: GangOptions) -> RunFolder:
    """The run folder of a job that runs ``script``: the same for the same command from here."""
    text = to_json([str(Path.cwd()), what_decides(script, options)])
    return folder_for(script.name, sha256(text).hexdigest())


def what_decides(script: Script, options: GangOptions) -> Any:
    """What two commands must have in common to mean one job.

    What is asked of SLURM may differ, except for the number of nodes. Defaults are left out, so
    that a new option changes no name; so is where it runs, which once was not an option.
    """
    num_nodes = options.num_nodes if options.slurm is None else options.slurm.num_nodes
    said, default = plain_options(options), plain_options(GangOptions())
    said = {name: value for name, value in said.items() if value != default[name]}
    for name in ("executor", "run_dir"):
        said.pop(name, None)
    return [script, num_nodes, {**said, "slurm": None}]


def handed_in_here(script: Script) -> Iterator[tuple[RunFolder, list[str]]]:
    """The folders below ``runs`` that were handed in from here, each with what was typed.

    They are found by that, because an older muster named them in another way.
    """
    for path in Path("runs").glob(f"{name_with_hash(script.name, '')}*"):
        folder = RunFolder(path)
        with suppress(SetupError):
            if (job := read_job(folder)) is None:
                continue
            if not isinstance(job.get("argv"), list):  # then its record has it
                record = read_run(folder)
                job = {"argv": list(record.argv), "cwd": record.cwd}
            if job.get("cwd") == str(Path.cwd()):
                yield folder, job["argv"]


def check_there(script: Script) -> None:
    """Raise TargetError where there is no such script."""
    if not script.is_python or script.is_module:
        return
    if Path(script.path).is_dir() and not Path(script.path, "__main__.py").exists():
        raise TargetError(
            f"{script.path} is a folder without a file __main__.py.", hint="name the script."
        )
    if Path(script.path).exists():
        return
    hint = "for a module write -m package.module, for another program --no-python."
    file = script.path.rpartition(":")[0]
    near = nearest(script.path, [path.name for path in Path().glob("*.py")])
    if Path(file).is_file():
        hint = f"a script is run as a whole: muster run {shell_word(file)}"
    elif script.path.startswith("python") and script.args and Path(script.args[0]).is_file():
        hint = f"leave {script.path} out: muster run {shell_word(script.args[0])}"
    elif script.path.isdecimal():
        hint = f"a flag has one value: --devices cpu:{script.path} is one word."
    elif near:
        hint = f"did you mean {near}? {hint[0].upper()}{hint[1:]}"
    raise TargetError(f"There is no script {script.path} (in {Path.cwd()}).", hint=hint)


def _check_program(script: Script, options: GangOptions) -> None:
    """Raise TargetError where it is to run on this machine, which has no such program or module."""
    if options.hosts is not None:
        return
    if script.is_module:
        _check_module(script.path)
    if script.is_python or shutil.which(script.path) is not None:
        return
    if "/" in script.path and Path(script.path).is_file():
        raise TargetError(
            f"{script.path} may not be executed.", hint=f"chmod +x {shell_word(script.path)}"
        )
    raise TargetError(
        f"There is no program {script.path} here.",
        hint="check its name, or give its path; `which NAME` shows where a program is.",
    )


def _check_module(name: str) -> None:
    """Raise TargetError for a module that no rank could find. Nothing of it is imported, so that a
    package which says by itself where its modules are is left to the ranks.
    """
    finder, parts = Finder([str(Path.cwd())]), name.split(".")
    above = Found(folders=tuple(finder.folders))
    for length in range(1, len(parts) + 1):
        found = finder.find(".".join(parts[:length])) if all(parts) else None
        if found is None:
            raise TargetError(
                f"There is no module {name} (seen from {Path.cwd()}).",
                hint=_hint_for_module(parts[: length - 1], parts[length - 1], name, above),
            )
        is_package = found.folders is not None
        if is_package and found.path is not None and b"__path__" in read_source(found.path):
            return
        above = found
    if above.folders is not None and finder.find(f"{name}.__main__") is None:
        names = ", ".join(f"{name}.{each}" for each in _own_modules(above)[:5])
        raise TargetError(
            f"{name} is a package without a module __main__, so it cannot be run.",
            hint=f"run one of its modules: {names}." if names else "name a module.",
        )


def _hint_for_module(before: list[str], last: str, name: str, above: Found) -> str:
    """``last`` was not found in ``above``, which is the package ``before``."""
    if Path(name).is_file():
        return f"a file is run without -m: muster run {shell_word(name)}"
    if near := nearest(last, _own_modules(above)):
        return f"did you mean {'.'.join([*before, near])}?"
    return (
        "a module is named as for python -m, from this folder: package/train.py is package.train. "
        "What lies elsewhere is found with PYTHONPATH."
    )


def _own_modules(package: Found) -> list[str]:
    """Names of the user's modules and packages there; of what is installed none."""
    found = set()
    for folder in map(Path, package.folders or ()):
        if not is_installed(folder / "any.py"):
            found |= {path.stem for path in folder.glob("*.py")}
            found |= {path.parent.name for path in folder.glob("*/__init__.py")}
    return sorted(name for name in found if not name.startswith("_"))


def _new_folder(name: str, node_rank: int) -> RunFolder:
    """A new folder ``runs/<name>-<time>``, with a number at its end where that name is taken."""
    stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}" + (f"-node{node_rank}" if node_rank else "")
    number = 1
    while True:
        path = default_root() / (stem if number == 1 else f"{stem}-{number}")
        try:
            path.mkdir(parents=True)
            return RunFolder(path)
        except FileExistsError:
            number += 1
