"""What a sweep that has begun is given: further tasks, for whoever works on it or into its ledger;
and other devices, now or for its next start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from muster.api.runs import Run, changing
from muster.api.start.earlier_work import check_code
from muster.api.start.lending import Lending
from muster.api.start.options import SweepOptions
from muster.api.start.placing import as_wanted, device_request, slots_of, would_take
from muster.api.sweeps.plans import stored_options
from muster.api.sweeps.workload import Workload, for_python, plan_id_of
from muster.base.errors import SetupError, UsageError
from muster.base.flags import own_words
from muster.base.settings import read_settings
from muster.base.shown_text import command_line, shell_word
from muster.devices.placement import Placement
from muster.farm.ledger.read import LedgerReader
from muster.farm.space_texts import check_priority
from muster.farm.steering import add_in
from muster.farm.task import NewTask
from muster.run.folder import RunFolder
from muster.run.requests import Ask, ask
from muster.run.session import is_held, open_run, stopped_process
from muster.run.state import is_between_starts, last_start

#: All that is added goes in by one transaction, during which a run at work does nothing else.
_MOST_AT_WORK = 50_000


class MissingTasks(NamedTuple):
    """Of the tasks that are asked for: those that the run does not have, each with the name of its
    target, and how many it has.
    """

    new: list[tuple[str, NewTask]]
    num_known: int


class Added(NamedTuple):
    """``is_at_work``: whether somebody worked on the run and took them up."""

    num_new: int
    num_known: int
    is_at_work: bool


def check_may_grow(run: Run) -> None:
    """UsageError for a run whose tasks are not the user's to add to, with what to do instead."""
    stored, path = run.stored, run.path
    if stored.is_map:
        raise UsageError(
            f"{path} is a map: its tasks are parts of one input.",
            hint="run a map of the new records alone, with another --output.",
        )
    if stored.is_gang:
        raise UsageError(
            f"{path} is {stored.kind_name}: it has ranks, and no tasks.",
            hint="for several settings, sweep over its command: muster sweep … -- muster …",
        )
    if stored.is_search:
        raise UsageError(
            f"{path} is a search, which chooses its tasks itself.",
            hint=f"let it try more, with a higher N: muster resume {shell_word(path)} --trials N",
        )
    if "recipe" in stored.spec:
        raise UsageError(
            f"{path} is of a recipe, whose report and figures show what its command asks for.",
            hint="give its command again with more values, such as more seeds.",
        )
    flags = {word.partition("=")[0] for word in own_words(stored.argv)}
    if run.folder.elements_json.exists() or run.folder.array or "--array" in flags:
        raise UsageError(
            f"{path} belongs to an array: its tasks are divided among the elements.",
            hint="give the command again that sent it, with more --seeds.",
        )
    if "--part" in flags:
        raise UsageError(
            f"{path} does a part of a plan, and others do the rest.",
            hint="give their commands again with more --seeds; what is done is not done again.",
        )


def missing_tasks(run: Run, workloads: Sequence[Workload], priority: int = 0) -> MissingTasks:
    """The tasks of ``workloads`` that the run does not have yet, in their order."""
    have: set[bytes] = set()
    if run.folder.ledger.exists():
        with LedgerReader(run.folder.ledger) as ledger:
            have = set(ledger.keys().values())
    new: dict[bytes, tuple[str, NewTask]] = {}
    known: set[bytes] = set()
    for workload in workloads:
        names = [spec.name for spec in workload.targets]
        for task in workload.feed({name: at for at, name in enumerate(names)}):
            if task.key in have:
                known.add(task.key)
            else:
                urgent = task._replace(priority=task.priority + priority)
                new.setdefault(task.key, (names[task.target_id], urgent))
    return MissingTasks(list(new.values()), len(known))


def add_tasks(
    run: Run,
    workloads: Sequence[Workload],
    *,
    said: Sequence[str] = (),
    listed: str = "",
    priority: int = 0,
    may_change_code: bool = False,
) -> Added:
    """Add what the run does not have of the tasks of ``workloads``, all of it or nothing.

    A coordinator that works on the run takes them up; otherwise they wait in the ledger for the
    next start. ``said``: the words that they were asked for with; ``listed``: the hash of the list
    file among them. Raises what ``check_may_grow``
    raises, PlanMismatchError for other code, and SetupError where they cannot be handed over.
    """
    check_may_grow(run)
    check_priority(priority)
    python = run.stored.options.get("python")
    for workload in workloads:
        here = for_python(workload, None if python is None else Path(python))
        check_code(run.folder, here.code, here.code_before, may_change=may_change_code)
    folder = run.folder
    while True:
        new, num_known = missing_tasks(run, workloads, priority)
        if not new:
            return Added(0, num_known, is_held(folder))
        if is_held(folder):
            if len(new) > _MOST_AT_WORK:
                raise UsageError(
                    f"{len(new):,} tasks are too many to add at once to a run at work.",
                    hint=f"add at most {_MOST_AT_WORK:,} at a time, or wait until it has ended.",
                )
            answer = ask(folder, {"add": _note(run, new, said, listed)}, lambda: is_held(folder))
            if answer is None:
                continue  # it has ended meanwhile
            return Added(*_counted(run, answer, len(new), num_known), is_at_work=True)
        try:
            with changing(folder) as ledger:
                numbers = {name: ledger.target_id(name) for name in {name for name, _ in new}}
                tasks = (task._replace(target_id=numbers[name]) for name, task in new)
                num_new = add_in(ledger, tasks, said, listed)
        except SetupError:
            if not is_held(folder):
                raise
            continue  # somebody was faster
        return Added(num_new, num_known + len(new) - num_new, is_at_work=False)


def _note(
    run: Run, new: Sequence[tuple[str, NewTask]], said: Sequence[str], listed: str
) -> dict[str, Any]:
    """What the coordinator is asked; `muster.farm.steering` reads it."""
    lines = [[name, task.payload.decode(), task.group, task.priority] for name, task in new]
    return {"plan": plan_id_of(run.stored.spec), "tasks": lines, "said": list(said),
            "list": listed}  # fmt: skip


def _counted(run: Run, answer: dict[str, Any], num_asked: int, num_known: int) -> tuple[int, int]:
    if "added" not in answer:
        why = answer.get("refused", "its muster is older and does not know how")
        raise SetupError(
            f"{run.path} is at work and has not added the tasks: {why}.",
            hint="ask again once it has ended.",
        )
    num_new = int(answer["added"])
    return num_new, num_known + num_asked - num_new


def shown_additions(folder: RunFolder) -> dict[str, str]:
    """What was added to the plan of a run, for people; by the numbers of the tasks."""
    if not folder.ledger.exists():
        return {}
    with LedgerReader(folder.ledger) as ledger:
        parts = ledger.added()
    return {
        f"added as {one.first} to {one.last}": command_line(one.said) or "by a call of Run.add"
        for one in parts
    }


def change_devices(run: Run, what: Mapping[str, Any], *, now: bool = False) -> dict[str, Any]:
    """Ask a run for other devices: ``{"release": 2}``, ``{"add": 2}`` or ``{"only": "0,3"}``.

    ``now``: its tasks there need not end, only reach their next checkpoint. Returns which it
    "has", "gives_back" and "takes", and "is_at_work"; where nobody works on it, it will begin so.
    Raises UsageError for what cannot be, and for a run of ranks, and SetupError where it does not
    answer.
    """
    stored, folder = run.stored, run.folder
    asked = {"devices": dict(what), "now": now}
    answers: list[Mapping[str, Any]] = []
    options = stored.options
    on_nodes = options.get("num_nodes", 1) > 1 or options.get("hosts") is not None
    if stored.is_program or (stored.is_gang and on_nodes):
        raise UsageError(
            f"{run.path} is {stored.kind_name}"
            + (", whose ranks" if stored.is_program else " on several nodes, whose ranks")
            + " work in lock-step: their number stays while they run.",
            hint=f"end it (muster cancel {shell_word(run.path)}), and start it on others.",
        )

    def is_at_work() -> bool:
        return is_held(folder) or (stored.is_gang and is_between_starts(folder))

    if is_held(folder) and (pid := stopped_process(folder)):
        raise SetupError(
            f"The process that works on {run.path} is stopped (Ctrl-Z): it keeps its devices and "
            "hears no request, so nothing is changed.",
            hint=f"let it go on, and ask again: kill -CONT {pid}",
        )
    if is_at_work():
        answer = ask(folder, asked, is_at_work)
        answers += [] if answer is None else [answer]
    if not answers and stored.is_gang:
        raise UsageError(
            f"{run.path} is {stored.kind_name}, and nobody works on it.",
            hint="go on with it on other devices: "
            f"muster resume {shell_word(run.path)} --devices N",
        )
    if not answers:
        answers.append({"is_at_work": False, **_write_down(run, asked)})
    [found] = answers
    if "refused" in found:
        kind = SetupError if found.get("is_setup") else UsageError
        raise kind(str(found["refused"]), hint=str(found["hint"]) or None)
    return {"is_at_work": True, **found}


def _write_down(run: Run, asked: Mapping[str, Any]) -> Mapping[str, Any]:
    """Change what the next start of a run begins with."""
    answers: list[Mapping[str, Any]] = []
    settings, options = read_settings(), stored_options(run)
    with open_run(run.folder):
        placement = would_take(as_wanted(run.folder, options), settings)
        _refuse_other_host(run.folder, options, placement)
        lending = Lending(run.folder, options, settings, slots_of(placement, options))
        with closing(lending):
            lending.hear(Ask(asked, answers.append))
    return answers[0]


def _refuse_other_host(folder: RunFolder, options: SweepOptions, placement: Placement) -> None:
    """UsageError where a run with GPUs would be given CPU workers, because here is no GPU."""
    labels: list[Any] = last_start(folder).begin.get("workers") or [""]
    had_gpus = str(labels[0]).startswith("cuda")
    is_auto = device_request(options).kind == "auto"
    if had_gpus and is_auto and placement.slots[0].kind == "cpu":
        raise UsageError(
            f"{folder.path} had GPUs when it last ran, and this machine shows none.",
            hint="ask on the machine where it will go on, or choose its devices there: "
            f"muster resume {shell_word(folder.path)} --devices N",
        )
