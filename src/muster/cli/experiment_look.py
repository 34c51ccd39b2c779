"""What commands that look at a run say of an experiment with phases."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from muster.api.experiments.experiment import (
    ExperimentFolder,
    PhaseStatus,
    experiments_in,
    find_experiment,
    run_in,
    state_of_all,
)
from muster.api.experiments.watching import QueuedRun
from muster.api.runs import Run, Status
from muster.api.start.queued_starts import process_to_end
from muster.base.clock import iso_utc
from muster.base.errors import MusterError, UsageError
from muster.base.shown_text import count, one_line, shell_word
from muster.cli import output
from muster.run.folder import RunFolder
from muster.run.session import holder


def status(folder: ExperimentFolder, *, is_json: bool) -> int:
    phases, is_running = folder.status(), folder.is_held()
    state = state_of_all(phases, is_running=is_running)
    if is_json:
        shown = [asdict(one) for one in phases]
        output.say_json({**_record(folder), "state": state, "phases": shown})
        return 0
    output.say(_headline(folder, phases, state))
    output.table(_COLUMNS, _rows(phases))
    if state in ("failed", "stopped", "cancelled", "not begun") and not is_running:
        output.say(f"  go on: muster resume {shell_word(folder.path)}")
    return 0


def status_lines(folder: ExperimentFolder) -> list[str]:
    """The same for a picture that is drawn again and again."""
    phases = folder.status()
    state = state_of_all(phases, is_running=folder.is_held())
    rows = [[one_line(cell) for cell in row] for row in _rows(phases)]
    return [_headline(folder, phases, state), *output.table_lines(_COLUMNS, rows)]


_COLUMNS = ("phase", "command", "state", "done", "why")


def _headline(folder: ExperimentFolder, phases: Sequence[PhaseStatus], state: str) -> str:
    num_done = sum(one.state == "done" for one in phases)
    return f"{folder.path.name}: {state}, {num_done} of {count(len(phases), 'phase')} done"


def _rows(phases: Sequence[PhaseStatus]) -> list[list[str]]:
    rows = []
    for one in phases:
        amount = output.amount(one.num_done, one.num_total, one.unit)
        rows.append([one.name, one.command, one.state, amount, one.why.partition("\n")[0]])
    return rows


def list_rows(root: Path) -> tuple[list[list[str]], list[dict[str, Any]]]:
    """Of each experiment below ``root`` its row, and its record."""
    rows, records = [], []
    for folder in experiments_in(root):
        created = iso_utc(folder.record.stat().st_mtime)
        try:
            phases = folder.status()
        except MusterError as error:
            rows.append([folder.path.name, "damaged", "", "", created])
            records.append({"name": folder.path.name, "path": str(folder.path), "state": "damaged",
                            "error": str(error)})  # fmt: skip
            continue
        state = state_of_all(phases, is_running=folder.is_held())
        num_done = sum(one.state == "done" for one in phases)
        num_failed = sum(one.state in ("failed", "refused", "damaged") for one in phases)
        amount = f"{num_done:,}/{len(phases):,} phases"
        rows.append([folder.path.name, state, amount, f"{num_failed:,}", created])
        records.append({**_record(folder), "state": state})
    return rows, records


def _record(folder: ExperimentFolder) -> dict[str, Any]:
    """With the keys of a run's status."""
    phases = folder.status()
    states = [one.state for one in phases]
    counts = {word: states.count(word) for word in ("done", "failed", "cancelled", "running")}
    found = Status(
        name=folder.path.name, path=str(folder.path), kind="sweep", state="not begun",
        is_running=folder.is_held(), num_done=counts["done"], num_total=len(phases), unit="phases",
        counts={**counts, "waiting": len(phases) - sum(counts.values())}, num_retried=0,
        is_enqueued=True, live=None,
    )  # fmt: skip
    return {**asdict(found), "kind": "experiment"}


def of_each(name: str, look: Callable[[Run], Any], *, is_json: bool) -> int | None:
    """Look at each phase that has begun; None where ``name`` is no experiment.

    ``look``: shows a run, or gives what is shown of it as JSON.
    """
    if (folder := find_experiment(name)) is None:
        return None
    found: dict[str, Any] = {}
    for phase in folder.status():
        run = run_in(folder.phase(phase.name))
        if not is_json:
            output.say(f"{phase.name}: {phase.state}{f', {phase.why}' if phase.why else ''}")
        if run is not None and phase.state not in ("not begun", "damaged"):
            found[phase.name] = look(run)
    if is_json:
        output.say_json(found)
    return 0


def at_work(folder: ExperimentFolder) -> Run | QueuedRun:
    """The phase that is at work, or waits for GPUs; UsageError where none does."""
    for phase in folder.status():
        run, place = run_in(folder.phase(phase.name)), folder.phase(phase.name).path
        if run is not None and phase.state in ("running", "starting again", "queued"):
            return run
        if process_to_end(place) is not None:
            return run or QueuedRun(place)
    if folder.is_held():
        pid, _, where = (holder(RunFolder(folder.path)) or "?").partition(" ")
        raise UsageError(
            f"{folder.path}: no phase is at work, but process {pid} is{where and f' {where}'}: it "
            "is between two phases.",
            hint=f"cancel it again in a moment, or end it{where and ' there'} with `kill {pid}`; "
            f"what is finished is kept, and `muster resume {shell_word(folder.path)}` goes on.",
        )
    raise UsageError(
        f"{folder.path}: no phase is at work, so there is nothing to cancel.",
        hint=f"`muster status {shell_word(folder.path)}` shows how they stand.",
    )
