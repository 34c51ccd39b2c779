"""``muster resume`` and ``muster retry``: go on with a run without typing it again.

A job of SLURM starts here as well: its nodes with ``--node-rank``, an array's with ``--element``.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

from muster.api.experiments.experiment import find_experiment
from muster.api.look.listing import find_first_stage, find_run
from muster.api.runs import Run
from muster.api.slurm.array import read_array
from muster.api.slurm.gang import NodeStart
from muster.api.start.options import SweepOptions
from muster.api.sweeps.plans import go_to, stored_options, stored_workload
from muster.api.sweeps.search_options import SearchOptions
from muster.base.errors import SetupError, UnknownNameError, UsageError
from muster.base.flags import Flag
from muster.base.shown_text import shell_word
from muster.cli import output
from muster.cli.commands import map as map_command
from muster.cli.commands import run as run_command
from muster.cli.commands import sweep, train
from muster.cli.flags import ONE_TIME, ShownFlags, job_digest, refuse_without_effect
from muster.cli.options import Part
from muster.cli.parse import Parsed, RunPlace, Said, parse_groups
from muster.cli.place_of_target import split_target
from muster.cli.recipes import with_seeds_as_stored
from muster.cli.values import split_command
from muster.farm.task import TaskState
from muster.hosts.names import parse_hosts
from muster.run.folder import RunFolder
from muster.run.record import Kind, RunRecord
from muster.run.session import is_held
from muster.slurm.commands import elements_of, living_job


@dataclass(frozen=True, kw_only=True)
class _RetryFlags:
    """What is run again."""

    cancelled: bool = False
    """Also run the cancelled tasks."""


@dataclass(frozen=True, kw_only=True)
class _JobFlags:
    """What a job of SLURM says."""

    element: int | None = None
    """Run this element of an array; the batch script of the array gives this flag."""
    of_script: Annotated[str, Flag(metavar="DIGEST")] = ""
    """A digest of the command that a batch script was made for: the script refuses to start
    another. Batch scripts give this flag."""


_RESUME = """Continue a run where it stopped; failed tasks stay failed.

The run goes on as it was begun; what is given here takes the place of what was said then. A map or
a training takes the flags of its own command.

Examples:
  muster resume runs/train-1a2b3c
  muster resume train-1a2b3c --gpus 4 --retries 2
"""
_RETRY = """Run the failed tasks of a run again, and whatever is left.

Examples:
  muster retry runs/train-1a2b3c
  muster retry train-1a2b3c --cancelled --timeout 2h
"""
#: What the help shows first.
_FIRST = (
    "run", "cancelled", "devices", "gpu_ids", "per_gpu", "retries", "retry_exceptions",
    "timeout_s", "keep_going", "executor", "allow_changed_code", "dry_run", "quiet", "json",
)  # fmt: skip
#: What may grow in a search, and what that is called in its record.
_BUDGET = {"trials": "trials", "search_time_s": "seconds", "gpu_hours": "gpu_hours"}
#: What goes on with a run of ranks or with a map, which are not retried either.
_COMMANDS: Mapping[Kind, Callable[..., int]] = {
    "map": map_command.start,
    "train": train.start,
    "agent": train.start,
    "run": run_command.start,
}


def main(argv: list[str]) -> int:
    name, words = split_target(argv, lambda word: find_experiment(word) is not None, _flags_of_all)
    if name and (experiment := find_experiment(name)) is not None:
        from muster.cli.commands import start

        return start.resume(experiment, words)
    run, extra = run_in(argv)
    if run is not None and run.stored.kind in _COMMANDS:
        return _resume_other(run, extra)
    return _go_on(argv, extra, "resume", _RESUME)


def retry(argv: list[str]) -> int:
    run, extra = run_in(argv)
    if run is not None and run.stored.kind in _COMMANDS:
        raise UsageError(
            f"{run.path} is {run.stored.kind_name}: there are no failed tasks to run again.",
            hint=f"to go on with it: {run.stored.how_it_goes_on(run.folder)}",
        )
    return _go_on(argv, extra, "retry", _RETRY)


def _flags_of_all() -> list[Any]:
    """The groups of options of whatever may have made the run, which is not known yet."""
    from muster.cli.map_flags import COMMON
    from muster.cli.train_flags import common_groups

    return [_JobFlags, _RetryFlags, *sweep.GROUPS.values(), *COMMON.values(), *common_groups()]


def run_in(
    argv: list[str], flags: Callable[[], Iterable[Any]] = _flags_of_all
) -> tuple[Run | None, list[str]]:
    """The run that is named, and the other words: flags and their values may stand before it."""
    name, words = split_target(argv, lambda word: _named(word) is not None, flags)
    run = _named(name) if name else None
    return (None, argv) if run is None else (run, words)


def _named(word: str) -> Run | None:
    with suppress(UnknownNameError):
        return find_first_stage(word) or find_run(word)
    return None


def _resume_other(run: Run, extra: list[str]) -> int:
    """A map, a training or a program: the command that made it is given again."""
    stored, path = run.stored, run.folder.whole.absolute()
    command = _COMMANDS[stored.kind]
    if not stored.argv:
        raise UsageError(
            f"{run.path} was made by a call of {stored.call} in a program, not by a command.",
            hint=f"give the same call again with run_dir={str(run.path)!r}; it goes on from there.",
        )
    if not stored.is_program:
        go_to(stored.cwd)
    before, typed, job = _both(stored, extra)
    _check_script(run.folder, job.of_script, job_digest(before), stored.argv)
    if stored.is_gang and "node_rank" in typed.given("options"):
        if before.given("options").get("executor") == "slurm":
            go_to(stored.cwd)
            return command(*_on_node(path, before, typed, stored.argv))
        if before.given("options").get("num_nodes", 1) == 1:
            raise UsageError(
                f"--node-rank is for a job or a run on several nodes, and {run.path} was last "
                f"started by: {shlex.join(stored.argv)}",
                hint="submit the job again, with its own command.",
            )
    if stored.is_program:
        raise _cannot_go_on(run)
    _let_typed_devices_hold(path, typed)
    again = _merged(path, before, typed, ONE_TIME)
    return command(_as_planned(again, typed), again.argv())


def _check_script(folder: RunFolder, of: str, digest: str, argv: Sequence[str]) -> None:
    """UsageError where a script was made for another command than the record has."""
    if of and of != digest:
        raise UsageError(
            f"This script was made for another run than {folder.path} now holds, which was begun "
            f"by: {shlex.join(argv)}",
            hint="write a new script with `muster slurm-script --output FILE …`.",
        )


def _cannot_go_on(run: Run) -> UsageError:
    stored, job = run.stored, None
    with suppress(SetupError):  # no SLURM here
        job = living_job(run.folder)
    line = f"{stored.cwd}: {shlex.join(stored.argv)}"
    if job is not None:
        return UsageError(
            f"{run.path} is {stored.kind_name}, and job {job[0]} does it.",
            hint=f"the same command follows the job, in {line}",
        )
    return UsageError(
        f"{run.path} is {stored.kind_name}, which muster cannot go on with by itself.",
        hint=f"a program that saves its state goes on when it is started again in {line}",
    )


def _on_node(
    path: Path, before: Parsed, typed: Parsed, argv: tuple[str, ...]
) -> tuple[Parsed, tuple[str, ...], NodeStart]:
    """What a node of a job starts: what the job was handed in for, at its place among the nodes.
    What was to be shown was for whoever handed it in.
    """
    local = [one for one in typed.said if one.option.flag.engines == ("local",)]
    place = {one.option.path[-1]: one.value for one in local}
    asked = tuple(one for one in before.said if one.option.owner is not ShownFlags)
    before, typed = (
        dataclasses.replace(before, said=asked),
        dataclasses.replace(typed, said=tuple(typed.but(place))),
    )
    return _merged(path, before, typed), argv, NodeStart(place, argv)


def _go_on(argv: list[str], extra: list[str], command: str, description: str) -> int:
    own = Part(of=SweepOptions, without=("run_dir", "name"))  # the run has its folder
    groups: dict[str, Any] = {"place": RunPlace, "options": own, "shown": ShownFlags}
    if command == "retry":
        groups["again"] = _RetryFlags
    else:
        groups |= {"search": Part(of=SearchOptions, only=tuple(_BUDGET)), "job": _JobFlags}
    parsed = parse_groups(groups, argv, command, description, common=_FIRST)
    refuse_without_effect(parsed, parsed.options.executor)
    run = find_run(parsed.place.run)
    budget = {_BUDGET[name]: value for name, value in parsed.given("search").items()}
    if budget and not run.stored.is_search:
        raise UsageError(
            f"{run.path} is no search: it has no trials and no time that could be raised.",
            hint=f"add tasks to it: muster add {shell_word(run.path)} --seeds N",
        )
    element = None if command == "retry" else _element(run, parsed)
    if element is None:
        _refuse_array(run, command, parsed.given("options").get("executor", "slurm"))
    if parsed.options.restart and (command == "retry" or not run.stored.argv):
        raise UsageError(
            f"--restart begins anew, and `muster {command}` goes on with {run.path}.",
            hint="give the command or the call again that began it, with --restart or "
            "restart=True.",
        )
    reopens: tuple[TaskState, ...] = ()
    if command == "retry":
        reopens = (TaskState.FAILED, *[TaskState.CANCELLED] * parsed.again.cancelled)
        counts = run.counts()
        if not any(counts[state] for state in reopens):
            return _nothing_to_retry(run, counts, is_json=parsed.shown.json)
    elif element is not None:
        return _run_element(*element, parsed)
    stored, path = run.stored, run.folder.whole.absolute()
    _let_typed_devices_hold(path, parsed)
    go_to(stored.cwd)
    if stored.argv:
        retried = {"again": _RetryFlags} if command == "retry" else {}
        before, typed, _ = _both(stored, extra, retried)
        again = _merged(path, before, typed, ONE_TIME)
        return sweep.start(_as_planned(again, typed), again.argv(), reopens)
    run = Run(path)  # which was named from where the user is
    workload = dataclasses.replace(stored_workload(run, budget), reopens=reopens)
    options = _options(parsed, stored_options(run))
    return sweep.run_and_sum_up(workload, options, (), parsed.shown)


def _element(run: Run, parsed: Parsed) -> tuple[RunFolder, int] | None:
    """The array and the number of the element that is meant; None where none is."""
    if parsed.job.element is not None:
        return run.folder, parsed.job.element
    array = run.folder.array
    return (array, int(run.path.absolute().name)) if array and not run.stored.argv else None


def _refuse_array(run: Run, command: str, engine: str) -> None:
    """UsageError for an array that would be sent a second time or done elsewhere, or whose elements
    are retried.
    """
    words, _ = split_command(run.stored.argv)
    if not any(word.partition("=")[0] == "--array" for word in words):
        return
    quoted = shell_word(run.path)
    if command == "retry":
        raise UsageError(
            f"{run.path} is an array: each of its elements is retried by itself.",
            hint=f"muster retry {quoted}/elements/N, then: muster collect {quoted}",
        )
    if engine != "slurm":
        raise UsageError(
            f"{run.path} is an array: it has no coordinator that could go on --on {engine}.",
            hint=f"its elements run here one by one: muster resume {quoted} --element 0, and so "
            f"on, then: muster collect {quoted}",
        )
    jobs: set[int] = set()
    with suppress(SetupError):  # no SLURM here
        found = elements_of(run.folder.array_name)
        jobs = {job for (job, _), item in found.items() if item.is_alive}
    if jobs:
        raise UsageError(
            f"{run.path} is an array, and job {max(jobs)} does it.",
            hint="wait for it, or end it with scancel.",
        )


def _run_element(folder: RunFolder, number: int, parsed: Parsed) -> int:
    from muster.cli.commands.slurm import digest_of_array, element_of

    array = read_array(folder)
    if array is None or not array.argv:
        raise UsageError(
            f"{folder.path} was not made with --array: it has no elements to run.",
            hint=f"go on with it: muster resume {shell_word(folder.path)}",
        )
    if not (0 <= number < array.elements or folder.element(number).exists()):
        raise UsageError(
            f"{folder.path} has no element {number}: it was begun as an array of {array.elements}.",
            hint=f"the elements are 0 to {array.elements - 1}.",
        )
    folder = RunFolder(folder.path.absolute())
    go_to(array.cwd)
    digest = digest_of_array(sweep.flags_of_sweep(array.argv[2:]))
    _check_script(folder, parsed.job.of_script, digest, array.argv)
    workload, options = element_of(array, folder, number)
    return sweep.run_and_sum_up(workload, _options(parsed, options), (), parsed.shown)


def _nothing_to_retry(run: Run, counts: Mapping[TaskState, int], *, is_json: bool) -> int:
    if is_json:
        output.say_json({**sweep.outcome(run, 0.0, []), "exit_code": 0})
        return 0
    output.say(f"{run.folder.name}: no task has failed, so there is nothing to run again")
    if is_held(run.folder):  # whatever else goes on with it would be refused
        output.say(f"  it is at work: muster attach {shell_word(run.path)}")
        return 0
    if counts[TaskState.CANCELLED]:
        output.say(f"  the cancelled ones: muster retry {shell_word(run.path)} --cancelled")
    if counts[TaskState.READY] + counts[TaskState.CLAIMED] or not sum(counts.values()):
        output.say(f"  what is left: muster resume {shell_word(run.path)}")
    return 0


def said_before(stored: RunRecord) -> Parsed:
    """What the stored command says; the caller is where it was started."""
    from muster.cli.main import read_command

    return read_command(with_seeds_as_stored(stored.spec.get("config") or {}, list(stored.argv)))


def _both(
    stored: RunRecord, extra: list[str], more: Mapping[str, Any] = MappingProxyType({})
) -> tuple[Parsed, Parsed, _JobFlags]:
    """What the stored command says, what is typed now, and what a job says."""
    before = said_before(stored)
    again = {"job": Part(of=_JobFlags, only=("of_script",))} | dict(more)
    both = parse_groups({**before.groups, **again}, extra, before.command, "")
    typed = dataclasses.replace(
        both, said=tuple(one for one in both.said if one.option.group in before.groups)
    )
    if any(said.option.path[-1] == "run_dir" for said in typed.said):
        raise UsageError(
            "--run-dir has no effect: a run goes on in its own folder.", hint="leave it out."
        )
    return before, typed, both.job


def _let_typed_devices_hold(path: Path, typed: Parsed) -> None:
    """They go before what `muster devices RUN` was asked for, also where the run was begun so."""
    if _DEVICES & typed.given("options").keys() and not typed.shown.dry_run:
        from muster.api.start.placing import forget_wanted

        forget_wanted(RunFolder(path))


def _as_planned(again: Parsed, typed: Parsed) -> Parsed:
    """A dry run changes nothing, so what `muster devices RUN` was asked for is still there; devices
    that are typed go before it all the same.
    """
    chosen = [one for one in typed.said if one.option.path[-1] in _DEVICES]
    if not chosen or not again.shown.dry_run:
        return again
    anew = dataclasses.replace(chosen[0].option, path=("is_chosen_anew",))
    return dataclasses.replace(again, said=(*again.said, Said(anew, "", (), True)), made={})


def _merged(path: Path, before: Parsed, typed: Parsed, without: Collection[str] = ()) -> Parsed:
    """The stored command in its own folder, with what is typed now on top of it."""
    gone = {*without, "run_dir", *(said.option.path[-1] for said in typed.said)}
    engines = {said.value for said in typed.said if said.option.name == "on"}
    if gone & _DEVICES:
        gone |= _DEVICES | _of_hosts(before, typed)
        if _said(before, "hosts") and not _said(typed, "hosts") and not _said(before, "executor"):
            engines = engines or {"local"}
    was = _said(before, "executor") or ("ray" if _said(before, "hosts") else "local")
    if engines - {was}:  # those lines were for the machines of before
        gone.add("hosts_setup")
    kept = [one for one in before.but(gone) if _works_on(engines, one)]
    return dataclasses.replace(before, said=(*kept, *typed.said)).saying(run_dir=path)


def _said(parsed: Parsed, name: str) -> Any:
    return next((one.value for one in parsed.said if one.option.path[-1] == name), None)


def _of_hosts(before: Parsed, typed: Parsed) -> set[str]:
    """What was said for the hosts of before and does not fit what is chosen now. How Python is
    found stays for other hosts: a pause goes on with those of before that are left.
    """
    hosts, least = _said(typed, "hosts"), _said(before, "min_nodes")
    if not _said(before, "hosts"):
        return set()
    if hosts is None:
        return {"hosts_setup", "hosts_python", "min_nodes", "master_addr", "master_port"}
    is_too_many = least is not None and least > len(parse_hosts(hosts))
    return {"master_addr", *["min_nodes"] * is_too_many}


def _works_on(engines: set[str], said: Said) -> bool:
    """Whether it has an effect on the engine that is typed now, if one is. Without --python tasks
    would run in another one than before: that is refused, not dropped.
    """
    known = said.option.flag.engines
    return not known or engines <= {*known} or said.option.name == "python"


#: A choice of devices replaces another; ``num_ranks`` is one of a gang's.
_DEVICES = {"devices", "gpu_ids", "max_gpus", "num_ranks", "hosts"}


def _options(parsed: Parsed, of: SweepOptions) -> SweepOptions:
    """The options ``of`` the run, with what is typed now on top of them."""
    given = parsed.given("options")
    is_here = given.get("executor", "ray") != "ray" or (_DEVICES - {"hosts"}) & given.keys()
    if of.cluster.hosts is not None and is_here and "hosts" not in given:
        nowhere = dataclasses.replace(of.cluster, hosts=None, hosts_python=None, hosts_setup=())
        of = dataclasses.replace(of, cluster=nowhere, executor="local")
    if _DEVICES & given.keys():
        of = dataclasses.replace(
            of, devices="auto", gpu_ids=None, max_gpus=None, is_chosen_anew=True
        )
    options: SweepOptions = parsed.make("options", of=of, run_dir=of.run_dir)
    return options
