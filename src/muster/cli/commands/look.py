"""Commands that look at runs, and the small ones that change them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from muster.api.experiments.experiment import ExperimentFolder, find_experiment
from muster.api.look.listing import (
    array_of,
    ended_job,
    find_run,
    find_runs,
    held_up_now,
    job_of,
    rejected_by,
    stopped_sentence,
    word_of,
)
from muster.api.runs import Run, Status
from muster.api.start.queued_starts import waiting_below
from muster.base.clock import human_duration, iso_utc
from muster.base.errors import EXIT_INTERRUPTED, MusterError, UsageError
from muster.base.flags import Flag
from muster.base.shown_text import count, shell_word, shown_mib
from muster.cli import output
from muster.cli.flags import JsonFlags, LookFlags
from muster.cli.parse import parse
from muster.farm.task import TaskState
from muster.run.state import has_saved

if TYPE_CHECKING:
    from muster.api.experiments.watching import Waited
    from muster.api.slurm.array import ArrayProgress


@dataclass(frozen=True, kw_only=True)
class _List(JsonFlags):
    """Which runs."""

    root: Annotated[Path, Flag(metavar="DIR")] = Path("runs")
    """The folder that holds the runs."""


@dataclass(frozen=True, kw_only=True)
class _Status(LookFlags):
    """Which run, and how it is shown."""

    watch: bool = False
    """Refresh it every two seconds until the run has ended."""


_WATCH_EVERY_S = 2.0

_LIST = """List the runs below a folder, the newest first.

Examples:
  muster list
  muster list --root /scratch/runs
"""
_STATUS = """Show a run's progress, also while it runs.

Examples:
  muster status runs/train-1a2b3c
  muster status train-1a2b3c --watch
"""
_ERRORS = """Show what failed, grouped by cause, the worst first.

Example:
  muster errors runs/train-1a2b3c
"""


def list_runs(argv: list[str]) -> int:
    flags = parse(_List, argv, "list", _LIST)
    found_runs = find_runs(flags.root)
    if not found_runs and flags.root.is_file():
        raise UsageError(
            f"--root {flags.root} is a file, not a folder of runs.",
            hint=f"write --root {flags.root.parent}, or look at one run with muster status.",
        )
    rows: list[list[str]] = []
    records: list[dict[str, Any]] = []
    damaged = []
    if not flags.root.is_file():
        from muster.cli.experiment_look import list_rows

        rows, records = list_rows(flags.root)
    for run in found_runs:
        try:
            found, created = run.status(), iso_utc(run.stored.created_s)
            array = array_of(run, asks_slurm=False)  # once for each run would take long
            num_rejected = None if found.is_running else rejected_by(run, if_published=True)
        except MusterError as error:
            # One run that cannot be read does not hide the others.
            damaged.append(f"{run.folder.name}: {str(error).splitlines()[0]}")
            rows.append([run.folder.name, "damaged", "", "", ""])
            records.append(
                {"name": run.folder.name, "path": str(run.path), "state": "damaged",
                 "error": str(error)}
            )  # fmt: skip
            continue
        state, held = word_of(found, array), held_up_now(run.folder, found)
        known: dict[str, Any] = {} if held is None else {"held_up": held._asdict()}
        known |= {} if num_rejected is None else {"rejected": num_rejected}
        records.append({**asdict(found), "state": state, **known})
        shown = f"{state}, {num_rejected:,} rejected" if num_rejected else str(state)
        shown += "" if held is None else f", {held.word}"
        num_failed = found.counts["failed"]
        unit = "" if found.unit == "tasks" else found.unit
        amount = output.amount(found.num_done, found.num_total, unit)
        rows.append([found.name, shown, amount, f"{num_failed:,}", created])
    if flags.json:
        output.say_json(records)
    elif rows:
        output.table(["run", "state", "done", "failed", "created"], rows)
    else:
        output.say(f"No runs in {flags.root}.")
    for line in damaged:
        output.remark(line)
    for name, pid in waiting_below(flags.root):
        stopped = stopped_sentence(pid) if pid else ""
        waits = f"it waits for GPUs, in process {pid} (muster queue)"
        output.remark(f"{name} has not begun: {waits}{stopped and f'; {stopped}'}")
    return 0


def status(argv: list[str]) -> int:
    flags = parse(_Status, argv, "status", _STATUS)
    if flags.watch:
        try:
            return _watch(flags.run, as_json=flags.json)
        except KeyboardInterrupt:
            return EXIT_INTERRUPTED
    if (experiment := find_experiment(flags.run)) is not None:
        from muster.cli import experiment_look

        return experiment_look.status(experiment, is_json=flags.json)
    return _show_status(find_run(flags.run), output.say, as_json=flags.json)


def _watch(name: str, *, as_json: bool) -> int:
    """The same again and again, in its place on a terminal, else where something has changed."""
    if as_json:
        raise UsageError("--watch and --json contradict each other.", hint="give one of them.")
    from muster.api.experiments.watching import as_now, is_at_work, open_waited, pause_s

    run = open_waited(name)
    with ExitStack() as stack:
        picture = stack.enter_context(output.LivePicture()) if output.is_terminal() else None
        last: list[str] = []
        while True:
            run = as_now(run)
            works, lines = is_at_work(run), _watched_lines(run)
            if picture is not None:
                picture.show_lines(lines)
            elif lines != last:
                output.say("\n".join(lines))
            last = lines
            if not works:
                return 0
            time.sleep(max(_WATCH_EVERY_S, pause_s(run)))


def _watched_lines(run: Waited) -> list[str]:
    if isinstance(run, ExperimentFolder):
        from muster.cli import experiment_look

        return experiment_look.status_lines(run)
    from muster.api.experiments.watching import QueuedRun, end_of, latest, what_it_waits_for

    if isinstance(run, QueuedRun):
        return [what_it_waits_for(run) or end_of(run).sentence]
    lines: list[str] = []
    _show_status(latest(run), lines.append, as_json=False)
    return lines


def _show_status(run: Run, say: Callable[[str], None], *, as_json: bool) -> int:
    found = run.status()
    progress = array_of(run, asks_slurm=True)
    job = job_of(run)
    state, ended = word_of(found, progress, job), ended_job(run, found, job)
    held = held_up_now(run.folder, found)
    if as_json:
        known: dict[str, Any] = {} if job is None else {"job_id": job[0]}
        known |= {} if ended is None else {"ended_job_id": ended}
        known |= {} if held is None else {"held_up": held._asdict()}
        if not found.is_running and (num := rejected_by(run)) is not None:
            known["rejected"] = num
        record = {**asdict(found), "state": state, **known, **_search_json(run)}
        output.say_json(record if progress is None else {**record, "array": _plain(progress)})
        return 0
    say(f"{found.name}: {state}")
    lines = _rank_lines(run, found) if run.stored.is_gang else _task_lines(run, found, progress)
    if job is not None and job[1].waits:
        lines.insert(0, f"waiting for SLURM job {job[0]} ({job[1].reason or 'no reason given'})")
    if ended is not None:
        log = run.folder.slurm_log(ended)
        lines.insert(0, f"job {ended} has ended before the run began; what it printed: {log}")
    if held is not None:
        lines.insert(0, held.sentence)
    for line in lines:
        say(f"  {line}")
    return 0


def _rank_lines(run: Run, found: Status) -> list[str]:
    lines = [] if found.training is None else [_training_words(found.training)]
    if found.state in ("saved", "stopped") and not run.stored.is_program and run.stored.argv:
        word = "go on" if has_saved(run.folder) else "nothing is saved; begin again"
        lines.append(f"{word}: muster resume {shell_word(run.path)}")
    if found.state == "failed":
        lines.append(f"see why: muster errors {shell_word(run.path)}")
    return [*lines, f"logs: {run.folder.logs}/rank-*.log"]


def _task_lines(run: Run, found: Status, progress: ArrayProgress | None) -> list[str]:
    shown = ", ".join(f"{n:,} {name}" for name, n in found.counts.items() if n)
    more = "" if found.is_enqueued else " (not all tasks are listed yet)"
    lines = [f"{shown or 'nothing done'} of {_total(found)}{more}", *_array_lines(run, progress)]
    if (most_mib := run.stored.options.get("memory_mib")) is not None:
        lines.append(f"a task may take {shown_mib(most_mib)} of memory (--memory)")
    if found.num_retried:
        was = "attempt was" if found.num_retried == 1 else "attempts were"
        lines.append(f"{found.num_retried:,} {was} tried again")
    if found.counts["failed"]:
        lines.append(f"see why: muster errors {shell_word(run.path)}")
    if not found.is_running:  # it reads what has become of each chunk
        lines += _rejected_lines(run)
    from muster.api.sweeps.search_state import read_search

    if (search := read_search(run.folder)) is not None:
        from muster.cli.search_wording import state_lines

        lines += state_lines(search)
    for worker in found.live["workers"] if found.live else ():
        elapsed = worker.get("elapsed_s")
        since = f" for {human_duration(elapsed)}" if isinstance(elapsed, int | float) else ""
        # Before its first task a worker says why it has to wait.
        task = worker["progress"] if worker["state"] == "starting" else worker["task"]
        lines.append(f"{worker['slot']}: {worker['state']} {task}{since}")
    return lines


def _rejected_lines(run: Run) -> list[str]:
    if not (num := rejected_by(run)):
        return []
    return [f"{count(num, 'record')} rejected; see why: muster why {shell_word(run.path)}"]


def _search_json(run: Run) -> dict[str, Any]:
    """How a search stands; nothing of any other run."""
    from muster.api.sweeps.search_state import read_search

    state = None if run.stored.is_gang else read_search(run.folder)
    if state is None:
        return {}
    best = [asdict(one) for one in state.search.best()]
    stopped = {f"{rung:g}": number for rung, number in state.num_by_rung.items()}
    return {"search": {"best": best, "stopped": stopped, "trials": len(state.search.trials)}}


def errors(argv: list[str]) -> int:
    flags = parse(LookFlags, argv, "errors", _ERRORS)
    if find_experiment(flags.run) is not None:
        from muster.cli.experiment_look import of_each

        of_each(flags.run, _error_record if flags.json else _show_errors, is_json=flags.json)
        return 0
    run = find_run(flags.run)
    if flags.json:
        output.say_json(_error_record(run))
        return 0
    return _show_errors(run)


def _error_record(run: Run) -> Any:
    if run.stored.is_gang:
        from muster.api.report.rank_failures import rank_failures

        found = rank_failures(run.folder)
        errors = [{"rank": rank, **asdict(error)} for rank, error in found.errors.items()]
        return {"report": list(found.report), "errors": errors}
    return [group._asdict() for group in run.failures()]


def _show_errors(run: Run) -> int:
    if run.stored.is_gang:
        return _rank_errors(run)
    groups = run.failures()
    if not groups:
        output.say("No attempt has failed.")
    for line in _rejected_lines(run):
        output.say(line)
    for group in groups:
        output.say(
            f"{count(group.num_failed, 'failed task')} ({count(group.num_attempts, 'attempt')}), "
            f"{group.outcome}: {group.message}"
        )
        for line in group.trace.rstrip().splitlines():
            output.say(f"    {line}")
        more = ", …" if (group.num_failed or group.num_tasks) > len(group.named) else ""
        output.say(f"  tasks: {', '.join(group.named)}{more}")
        output.say(
            f"  what one printed: muster logs {shell_word(run.path)} {group.named[0].split()[0]}\n"
        )
    return 0


def _rank_errors(run: Run) -> int:
    from muster.api.report.rank_failures import rank_failures

    failures = rank_failures(run.folder)
    report, found = failures.report, failures.errors
    if not (report or found):
        output.say("No rank has failed.")
        return 0
    first = next(iter(found.values()), None)
    if first is None or not report or first.text not in report[0]:
        for line in report:  # of a rank that was killed, and so could not write anything down
            output.say(line)
    for rank, error in found.items():
        output.say(f"{failures.who(rank)}: {error.text}")
        for frame in error.frames:
            output.say(f"  {frame}")
        output.say(f"  what it printed: muster logs {shell_word(run.path)} {rank}")
    return 0


def _total(found: Status) -> str:
    total = found.total if found.num_total is None else found.num_total
    return count(total, found.unit.removesuffix("s"))


def _training_words(trained: Mapping[str, Any]) -> str:
    """One line from a live picture, from results or from a recorded step, as far as it says it."""
    parts = []
    step, total = _number(trained, "step"), _number(trained, "total_steps")
    episodes, epochs = _number(trained, "episodes"), _number(trained, "epochs")
    if isinstance(trained.get("metrics"), Mapping):  # results
        parts += [count(int(n), one) for one in ("step", "epoch", "episode")
                  if (n := _number(trained, f"{one}s")) is not None]  # fmt: skip
        for split, metrics in trained["metrics"].items():
            numbers = metrics if isinstance(metrics, Mapping) else {}
            shown = [f"{k} {v:.4f}" for k, v in numbers.items() if isinstance(v, int | float)]
            parts.append(f"{split} {', '.join(shown)}")
        return " · ".join(parts)
    if episodes is not None:  # an agent
        done = _number(trained, "env_steps")
        done = step if done is None else done
        parts += [] if done is None else [f"step {done:,}"]
        parts += [count(int(episodes), "episode")]
    elif step is not None:
        parts += [f"step {step:,}" + (f" of {total:,}" if total else "")]
        epoch = _number(trained, "epoch")
        last = "" if epochs is None else f" of {epochs:,}"
        parts += [] if epoch is None else [f"epoch {min(epoch + 1, epochs or epoch + 1):,}{last}"]
    for name, form in (("loss", ".4f"), ("return", ".4g")):
        if (value := _number(trained, name)) is not None:
            parts.append(f"{name} {value:{form}}")
    for unit in ("samples", "steps"):
        if (rate := _number(trained, f"{unit}_per_s")) is not None:
            parts.append(f"{rate:,.0f} {unit}/s")
    if (left_s := _number(trained, "eta_s")) is not None:
        parts.append(f"{human_duration(left_s)} to go")
    return " · ".join(parts)


def _number(record: Mapping[str, Any], name: str) -> int | float | None:
    value = record.get(name)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _plain(progress: ArrayProgress) -> dict[str, Any]:
    counts = {state.name.lower(): number for state, number in progress.counts.items()}
    return {**progress._asdict(), "counts": counts}


def _array_lines(run: Run, progress: ArrayProgress | None) -> list[str]:
    if progress is None:
        return []
    num_ended = progress.num_begun - progress.num_running
    parts = {"at work": progress.num_running, "queued": progress.num_queued, "ended": num_ended}
    shown = ", ".join(f"{number:,} {word}" for word, number in parts.items() if number)
    done, failed = progress.counts[TaskState.DONE], progress.counts[TaskState.FAILED]
    return [
        f"array of {progress.num_elements:,} elements: {shown or 'none has begun'}",
        f"in the elements: {done:,} done, {failed:,} failed; bring them here: "
        f"muster collect {shell_word(run.path)}",
    ]
