"""Commands that look at runs, and the small ones that change them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from muster.api.gangs import last_ending
from muster.api.runs import Run, find_runs, open_run
from muster.api.training_state import training_state
from muster.base.clock import human_duration, iso_utc
from muster.base.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_REQUEUE
from muster.cli import output
from muster.cli.flags import Positional, Switch
from muster.cli.parse import parse
from muster.farm.model import TaskState

if TYPE_CHECKING:
    from muster.api.array import ArrayProgress


@dataclass(frozen=True)
class _List:
    root: Path = Path("runs")
    """The folder that holds the runs."""
    json: Switch = False
    """As JSON."""


@dataclass(frozen=True)
class _Look:
    run: Positional
    """The run's folder, or its name below ./runs."""
    json: Switch = False
    """As JSON."""


@dataclass(frozen=True)
class _Logs:
    run: Positional
    """The run's folder, or its name below ./runs."""
    task: Positional
    """The task's number, or the start of its key as in the table's column `task`."""


@dataclass(frozen=True)
class _Export:
    run: Positional
    """The run's folder, or its name below ./runs."""
    to: Annotated[Path, tyro.conf.arg(metavar="FILE")]
    """A .csv, .parquet or .jsonl file."""


def list_runs(argv: list[str]) -> int:
    flags = parse(_List, argv, "list", "The runs below ROOT, the newest first.")
    rows = []
    records = []
    for run in find_runs(flags.root):
        status = run.status()
        records.append(asdict(status))
        done, total = status.counts["done"], status.total
        array = _array(run, asks_slurm=False)  # once for each run would take long
        state = "running" if status.is_running else _state(run, status.counts, array)
        created = iso_utc(run.stored.created_s)
        rows.append(
            [status.name, state, f"{done:,}/{total:,}", f"{status.counts['failed']:,}", created]
        )
    if flags.json:
        output.say_json(records)
    elif rows:
        output.table(["run", "state", "done", "failed", "created"], rows)
    else:
        output.say(f"No runs in {flags.root}.")
    return 0


def status(argv: list[str]) -> int:
    flags = parse(_Look, argv, "status", "How far a run is, also while it runs.")
    run = open_run(flags.run)
    found = run.status()
    progress = _array(run, asks_slurm=True)
    state = "running" if found.is_running else _state(run, found.counts, progress)
    trained = None
    if _is_gang(run):
        trained = training_state(run.folder, is_running=found.is_running)
    if flags.json:
        record = {**asdict(found), "state": state, "training": trained}
        output.say_json(record if progress is None else {**record, "array": _plain(progress)})
        return 0
    output.say(f"{found.name}: {state}")
    if _is_gang(run):
        if trained is not None:
            output.say(f"  {_training_words(trained)}")
        if state == "saved" and run.stored.kind != "run":
            output.say(f"  go on: muster resume {run.path}")
        output.say(f"  logs: {run.folder.logs}/rank-*.log")
        return 0
    array = _array_lines(run, progress)
    shown = ", ".join(f"{n:,} {name}" for name, n in found.counts.items() if n)
    more = "" if found.is_enqueued else " (not all tasks are listed yet)"
    output.say(f"  {shown or 'no tasks'} of {found.total:,}{more}")
    for line in array:
        output.say(f"  {line}")
    if found.num_retried:
        output.say(f"  {found.num_retried:,} attempts were tried again")
    if found.live:
        for worker in found.live["workers"]:
            elapsed = worker["elapsed_s"]
            since = f" for {human_duration(elapsed)}" if elapsed is not None else ""
            # Before its first task a worker says why it has to wait.
            task = worker["progress"] if worker["state"] == "starting" else worker["task"]
            output.say(f"  {worker['slot']}: {worker['state']} {task}{since}")
    return 0


def logs(argv: list[str]) -> int:
    flags = parse(_Logs, argv, "logs", "What a task printed, one part per attempt.")
    run = open_run(flags.run)
    parts = run.log(flags.task)
    if not parts:
        output.say(
            "This task has not ended an attempt yet; its output is in " + str(run.folder.logs)
        )
    for part, text in parts:
        output.say(f"--- attempt {part.token} ({part.outcome}), {part.log}")
        output.say(text.rstrip("\n"))
    trace = run.trace(flags.task)
    if trace:
        output.say(f"--- error\n{trace.rstrip()}")
    return 0


def errors(argv: list[str]) -> int:
    flags = parse(
        _Look, argv, "errors", "Failed attempts grouped by cause, the most frequent first."
    )
    groups = open_run(flags.run).failures()
    if flags.json:
        output.say_json([group._asdict() for group in groups])
        return 0
    if not groups:
        output.say("No attempt has failed.")
    for group in groups:
        output.say(
            f"{group.num_failed:,} failed tasks ({group.num_attempts:,} attempts), "
            f"{group.outcome}: {group.message}"
        )
        for line in group.trace.rstrip().splitlines():
            output.say(f"    {line}")
        output.say(f"  tasks: {', '.join(group.tasks)}\n")
    return 0


def export(argv: list[str]) -> int:
    flags = parse(_Export, argv, "export", "Write the table of a run, one row per task, to a file.")
    count = open_run(flags.run).export(flags.to)
    output.say(f"{count:,} rows in {flags.to}")
    return 0


def cancel(argv: list[str]) -> int:
    flags = parse(_Look, argv, "cancel", "Cancel what has not ended; what is finished is kept.")
    run: Run = open_run(flags.run)
    asked = run.cancel()
    if flags.json:
        output.say_json({"run": run.folder.name, "asked_coordinator": asked})
    else:
        how = "asked its coordinator to cancel" if asked else "cancelled"
        output.say(f"{run.folder.name}: {how} what has not ended")
    return 0


def _training_words(trained: Mapping[str, Any]) -> str:
    """One line from a live picture, from results or from a recorded step."""
    if "metrics" in trained:
        unit = "epochs" if "epochs" in trained else "episodes"
        parts = [f"{trained['steps']:,} steps, {trained[unit]:,} {unit}"]
        for split, metrics in trained["metrics"].items():
            shown = [f"{k} {v:.4f}" for k, v in metrics.items() if isinstance(v, int | float)]
            parts.append(f"{split} {', '.join(shown)}")
        return " · ".join(parts)
    if "episodes" in trained:  # an agent
        parts = [f"step {trained.get('env_steps', trained['step']):,}"]
        parts += [f"{trained['episodes']:,} episodes"]
        parts += [f"return {trained['return']:.4g}"] if trained.get("return") is not None else []
    else:
        total = trained.get("total_steps")
        parts = [f"step {trained['step']:,}" + (f" of {total:,}" if total else "")]
        parts += [f"epoch {trained['epoch'] + 1}"]
        parts += [f"loss {trained['loss']:.4f}"] if trained.get("loss") is not None else []
    for unit in ("samples", "steps"):
        if trained.get(f"{unit}_per_s") is not None:
            parts.append(f"{trained[f'{unit}_per_s']:,.0f} {unit}/s")
    if trained.get("eta_s") is not None:
        parts.append(f"{human_duration(trained['eta_s'])} to go")
    return " · ".join(parts)


def _is_gang(run: Run) -> bool:
    return run.stored.is_gang


def _array(run: Run, *, asks_slurm: bool) -> ArrayProgress | None:
    """Of a run with --array, which has no coordinator; None for any other."""
    if not run.folder.elements_json.exists():
        return None
    from muster.api.array import array_progress

    return array_progress(run.folder, asks_slurm=asks_slurm)


def _plain(progress: ArrayProgress) -> dict[str, Any]:
    counts = {state.name.lower(): number for state, number in progress.counts.items()}
    return {**progress._asdict(), "counts": counts}


def _array_lines(run: Run, progress: ArrayProgress | None) -> list[str]:
    if progress is None:
        return []
    num_ended = max(0, progress.num_begun - progress.num_running)
    parts = {"at work": progress.num_running, "queued": progress.num_queued, "ended": num_ended}
    shown = ", ".join(f"{number:,} {word}" for word, number in parts.items() if number)
    done, failed = progress.counts[TaskState.DONE], progress.counts[TaskState.FAILED]
    return [
        f"array of {progress.num_elements:,} elements: {shown or 'none has begun'}",
        f"in the elements: {done:,} done, {failed:,} failed; bring them here: "
        f"muster collect {run.path}",
    ]


def _state(run: Run, counts: object, array: ArrayProgress | None = None) -> str:
    assert isinstance(counts, dict)
    if _is_gang(run):
        code = last_ending(run.folder)
        words = {
            EXIT_OK: "done",
            EXIT_REQUEUE: "saved",
            EXIT_INTERRUPTED: "stopped",
            None: "stopped",
        }
        return words.get(code, "failed")
    if array is not None and (array.num_running or array.num_queued):
        return "running" if array.num_running else "queued"
    if counts["waiting"] or counts["running"]:
        return "stopped" if array is None else "not collected"
    if counts["cancelled"]:
        return "cancelled"
    return "failed" if counts["failed"] else "done"
