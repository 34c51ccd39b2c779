"""Why a run, or one of its tasks, stands as it does: its state, the causes, what it printed last,
and what to try. ``muster why`` shows it, and the pages of runs take their causes from here.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from muster.api.look.listing import HeldUp, array_of, ended_job, held_up_now, job_of, word_of
from muster.api.look.ranks import rank_log
from muster.api.maps.publish import tally
from muster.api.report.about import farm_state, gang_state, rejects
from muster.api.report.content import Health
from muster.api.report.map import map_state, stage_folders
from muster.api.report.rank_failures import failed_rank, rank_failures
from muster.api.runs import Run, Status
from muster.api.start.code_watch import changes_of_code
from muster.base.atomic_files import DISK_REFUSALS, refusal_of
from muster.base.errors import MusterError
from muster.base.journal import last_lines, read_journal
from muster.base.shown_text import count, shell_word, shown_mib
from muster.base.signals import CANCEL, shown_request
from muster.farm.canonical import task_label
from muster.farm.ledger.read import LedgerReader
from muster.farm.ledger.records import AttemptRow, LogPart
from muster.farm.outcomes import REASONS
from muster.farm.task import Outcome, TaskState
from muster.run.folder import RunFolder
from muster.run.session import is_held
from muster.run.state import Start, has_saved, last_start, last_word
from muster.slurm.states import JobStatus

if TYPE_CHECKING:
    from muster.api.slurm.array import ArrayProgress

_NUM_LINES, _MOST_NOTES = 12, 3
_HINT = "\nHint: "
_LEAST_FREE = 4 << 20  # bytes: less than a ledger, its log and a table need to go on
_LEVELS = {"done": "good", "running": "working", "queued": "working",
           "starting again": "working", "failed": "bad", "refused": "bad"}  # fmt: skip
#: What happens in a run without anything being wrong.
_QUIET = ("start", "end", "enqueued")
#: What helps against an end that is no mistake in the code.
_ADVICE = {
    Outcome.DEVICE_OOM: "let a task take less GPU memory, or put fewer on a GPU: --per-gpu 1",
    Outcome.HOST_OOM: "say what a task may take, such as --memory 12G, so that no more run at once "
    "than fit; or --devices cpu:N, --per-gpu 1",
    Outcome.MEMORY_LIMIT: "allow a task more, such as --memory 16G, or let it take less",
    Outcome.TIMEOUT: "give a task more time: --timeout 2h",
    Outcome.JOB_TIMEOUT: "ask the cluster for more time, or make tasks shorter",
    Outcome.DEVICE_FAULT: "muster doctor",
    Outcome.BROKEN_CONTEXT: "muster doctor",
}


class Cause(NamedTuple):
    """What failed in one way. ``num``: how many ``unit`` (attempts, records, starts or ranks);
    ``failed``: tasks that stay failed for it. ``tasks``: the keys of the first, ``named``: what
    they are called. ``outcome``: of tasks, as the ledger names it.
    """

    text: str
    num: int
    unit: str
    trace: str
    failed: int = 0
    tasks: tuple[str, ...] = ()
    named: tuple[str, ...] = ()
    outcome: str = ""
    first_s: float | None = None
    last_s: float | None = None
    number: int | None = None  # of the cause in the ledger


@dataclass(frozen=True, kw_only=True)
class Why:
    """``task``: the task or rank that was asked for, "" for the run. ``sentence``: how it stands;
    ``reasons``: what ended it, beside the ``causes`` of failures. ``lines``: the last that ``log``
    holds of it. ``tries``: commands and advice.
    """

    path: str
    kind: str
    state: str
    sentence: str
    task: str = ""
    reasons: tuple[str, ...] = ()
    causes: tuple[Cause, ...] = ()
    log: str = ""
    lines: tuple[str, ...] = ()
    tries: tuple[str, ...] = ()


def why(run: Run, task: str | None = None) -> Why:
    """Raises UsageError where there is no such task or rank. A run that cannot be read is a state
    of its own.
    """
    try:
        stored, status = run.stored, run.status()
    except MusterError as error:
        text, _, hint = str(error).partition(_HINT)
        return Why(path=str(run.path), kind="", state="unreadable", sentence=text,
                   tries=(hint or "restore it from a copy.",))  # fmt: skip
    if task is not None and not stored.is_gang:
        return _of_task(run, task)
    kind = "search" if stored.is_search else stored.kind
    array, job = array_of(run, asks_slurm=True), job_of(run)
    ended, held = ended_job(run, status, job), held_up_now(run.folder, status)
    status = dataclasses.replace(status, state=word_of(status, array, job))
    found = tuple(causes(run)) if status.state not in ("not begun", "queued") else ()
    log, lines = _of_ranks(run, task) if stored.is_gang else _of_worst(run, status, found)
    return Why(
        path=str(run.path), kind=kind, state=status.state,
        sentence=verdict(run, status)[1] if array is None else _elements(array),
        task=task or "", causes=found, log=log, lines=lines,
        reasons=(*_of_job(run, job, ended), *_of_held(held), *_reasons(run, status)),
        tries=tuple(_tries(run, status, found)) if held is None else (held.command,),
    )  # fmt: skip


def verdict(run: Run, status: Status) -> tuple[str, str]:
    """A level (good, working, bad, or paused: somebody has to go on with it), and the sentence of
    the report.
    """
    text, health = _sentence(run, status)
    level = _LEVELS.get(status.state, "paused")
    if health is Health.BAD or (status.state == "running" and status.counts.get("failed")):
        level = "bad"
    elif health is Health.OPEN and level == "good":
        level = "paused"
    return level, text.removesuffix(" What is missing is left out below.")


def _sentence(run: Run, status: Status) -> tuple[str, Health]:
    if run.stored.is_gang:
        return gang_state(run.folder, status)
    if status.state == "not begun":
        return "It has not begun.", Health.OPEN
    if not run.stored.is_map or status.is_running:
        return farm_state(status)
    try:
        return map_state(run, [tally(each) for each in stage_folders(run.folder)])
    except (MusterError, LookupError, TypeError, ValueError, AttributeError):
        return "Its records cannot be counted: what is written down is damaged.", Health.OPEN


def causes(run: Run) -> Iterator[Cause]:
    """What failed, the most frequent first: attempts of tasks and records of a map, or ranks."""
    if run.stored.is_gang:
        yield from _causes_of_ranks(run.folder)
        return
    if run.folder.ledger.exists():
        for group in run.failures():
            yield Cause(
                (group.message or group.outcome).splitlines()[0], group.num_attempts, "attempts",
                group.trace or group.message, group.num_failed, group.tasks, group.named,
                group.outcome, group.first_s, group.last_s, group.number,
            )  # fmt: skip
    for one in rejects(run.folder):
        where = f" in the stage {one.stage}" if one.stage else ""
        yield Cause(f"{one.reason}{where}", one.num, "records", one.example)


def _causes_of_ranks(folder: RunFolder) -> Iterator[Cause]:
    found = rank_failures(folder)
    if found.report:
        yield Cause(found.report[0], 1, "starts", "\n".join(found.report))
    for rank, error in found.errors.items():
        text, who = f"{error.type}: {error.message}", found.who(rank).capitalize()
        yield Cause(f"{who}: {text}", 1, "ranks", "\n".join((*error.frames, text)),
                    first_s=error.time_s, last_s=error.time_s)  # fmt: skip


def alerts(folder: RunFolder) -> Iterator[tuple[str, str]]:
    """What happened beside the work, each with a level (bad or paused): a device in quarantine, a
    job that was cancelled, a stall.
    """
    for event in read_journal(folder.events):
        if found := event.get("stall") or event.get("error"):
            yield "bad", str(found).partition(_HINT)[0]
        elif event.get("event") not in _QUIET and event.get("text"):
            yield "paused", str(event["text"])


def _elements(array: ArrayProgress) -> str:
    done, failed = array.counts[TaskState.DONE], array.counts[TaskState.FAILED]
    tasks = f"{count(done, 'task')} done, {failed:,} failed."
    return f"An array of {array.num_elements:,} elements: {tasks}"


def _of_job(run: Run, job: tuple[str, JobStatus] | None, ended: str | None) -> Iterator[str]:
    if job is not None and job[1].waits:
        yield f"It waits for SLURM job {job[0]} ({job[1].reason or 'no reason given'})."
    if ended is not None:
        log = run.folder.slurm_log(ended)
        yield f"Job {ended} has ended before the run began; what it printed: {log}"


def _of_held(held: HeldUp | None) -> Iterator[str]:
    if held is not None:
        yield f"{held.sentence[0].upper()}{held.sentence[1:]}."


def _reasons(run: Run, status: Status) -> Iterator[str]:
    """What ended the last start, where the work was not done by then; of one that goes on, what
    has happened to it.
    """
    if status.state in ("not begun", "queued", "starting again"):
        return
    start = last_start(run.folder)
    if status.state == "done":
        yield from changes_of_code(run.folder)
        return
    if status.is_running:
        yield from [str(one["text"]) for one in start.lines if one.get("text")][-_MOST_NOTES:]
        return
    if start.lines and not start.end:
        yield "Its process was killed (kill -9, out of memory), or its machine went down."
        yield from _full_disk(run.folder)
    for event in start.lines:
        if text := event.get("stall") or event.get("text") or event.get("error"):
            yield str(text).partition(_HINT)[0]
    yield from _asked_to_end(start)
    word = last_word(run.folder) if status.state in ("refused", "failed") else {}
    if word.get("ending") == "refused" and (message := word.get("message")):
        yield str(message)


def _full_disk(folder: RunFolder) -> Iterator[str]:
    """Where nothing tells of an end, because there may have been no room to write it down."""
    free, full = shutil.disk_usage(folder.path).free, DISK_REFUSALS[errno.ENOSPC]
    refusal = full if free < _LEAST_FREE else None
    # Quota and limit are those of whoever looks. Windows has no ids, and says 0 of each file.
    if refusal is None and folder.path.stat().st_uid == getattr(os, "geteuid", lambda: 0)():
        refusal = refusal_of(folder.ledger, _LEAST_FREE)
    # That it may only be read from here says nothing of where the run was.
    if refusal is not None and refusal != DISK_REFUSALS[errno.EROFS]:
        known = f" ({shown_mib(free / 2**20)} are free)" if free < _LEAST_FREE else ""
        which = "the likely" if refusal == full else "a possible"
        yield (
            f"{refusal.what.format(folder.path)} now{known}, which is {which} cause: how it "
            f"ended may not have been written for that. Before it goes on: {refusal.hint}."
        )


def _asked_to_end(start: Start) -> Iterator[str]:
    """Who asked the start to end, where that is written down; versions before did not for tasks."""
    names = [str(start.end.get("stopped_by") or "")]
    names += [str(line.get("by")) for line in start.lines if line.get("event") == "asked"]
    wishes = [line.get("what") for line in start.lines if line.get("event") == "wish"]
    names += [CANCEL] * (CANCEL in wishes)
    if any(line.get("event") == "limit" for line in start.lines):
        names = [name for name in names if name != "SIGTERM"]  # its own, and it was told above
        wishes = []
    if names := [name for name in dict.fromkeys(names) if name]:
        yield f"It was ended by {' and '.join(map(shown_request, names))}."
    elif wishes:
        yield "It was asked to end, by Ctrl-C, a signal or `muster cancel`."


def _has_paused(lines: list[dict[str, Any]]) -> bool:
    """Whether a start with these lines gave up because all tasks failed alike."""
    return any(line.get("event") == "paused" for line in lines)


def _again(run: Run, *, cancelled: bool = False) -> str:
    """How tasks are tried again: `muster retry` refuses maps, and arrays as a whole."""
    if run.stored.is_map:
        return run.stored.how_it_goes_on(run.folder)
    quoted, flag = shell_word(run.path), " --cancelled" * cancelled
    if run.folder.elements_json.exists():
        return f"muster retry {quoted}/elements/N{flag}, then: muster collect {quoted}"
    return f"muster retry {quoted}{flag}"


def _tries(run: Run, status: Status, found: tuple[Cause, ...]) -> Iterator[str]:
    stored, quoted = run.stored, shell_word(run.path)
    goes_on = stored.how_it_goes_on(run.folder)
    yield from dict.fromkeys(
        _ADVICE[Outcome(one.outcome)] for one in found if one.failed and one.outcome in _ADVICE
    )
    since = last_start(run.folder).lines
    if since and not status.is_running:
        _, _, hint = str(since[-1].get("error")).partition(_HINT)
        yield from [hint] if hint else []
    if any(one.unit == "records" for one in found):
        yield f"the records that were rejected: {run.folder.errors_jsonl}"
    match status.state:
        case "running" | "starting again" | "queued":
            yield f"muster status {quoted}"
        case "done":
            yield f"muster report {quoted}"
        case "cancelled":
            yield _again(run, cancelled=True)
        case "not collected":
            yield f"muster collect {quoted}"
        case "failed" if stored.is_gang:
            if any(event.get("stall") for event in since):
                yield f"see where each rank stood: {run.folder.logs}/rank-*.stack"
            rank = failed_rank(run.folder)
            yield f"muster logs {quoted}" + ("" if rank is None else f" {rank}")
            yield goes_on
        case "failed":
            for one in found:
                if one.failed and one.named:
                    yield f"muster logs {quoted} {one.named[0].split()[0]}"
                    break
            yield _again(run)
        case "stopped" if _has_paused(since) and status.counts.get("failed"):
            yield _again(run)
        case "saved" | "refused" | "not begun" | "not written":
            yield goes_on
        case _:
            begins_anew = stored.is_gang and not stored.is_program and not has_saved(run.folder)
            yield goes_on + (" (nothing is saved: it begins again)" if begins_anew else "")


def _of_ranks(run: Run, rank: str | None) -> tuple[str, tuple[str, ...]]:
    """The log of the rank, by default of the one that failed first, and its end."""
    try:
        _, path = rank_log(run.folder, rank)
    except MusterError:
        if rank is not None:
            raise
        path = run.folder.agent_log(0)
    lines = last_lines(path, _NUM_LINES)
    return (str(path), lines) if lines else ("", ())


def _of_worst(
    run: Run, status: Status, found: tuple[Cause, ...]
) -> tuple[str, tuple[str, ...]]:  # fmt: skip
    """What the task printed that stands for most failures; of a run that was cut off or goes on,
    what was printed last of all.
    """
    for cause in found:
        if cause.failed and cause.tasks:
            return _printed(run, run.log_parts(cause.tasks[0]))
    if status.state in ("done", "cancelled"):
        return "", ()
    logs = sorted(run.folder.logs.glob("worker-*.log"), key=lambda path: path.stat().st_mtime)
    for path in reversed(logs):
        if lines := last_lines(path, _NUM_LINES):
            return str(path), lines
    return "", ()


def _printed(run: Run, parts: list[LogPart]) -> tuple[str, tuple[str, ...]]:
    for part in parts[-1:]:
        path = run.folder.logs / part.log
        if lines := last_lines(path, _NUM_LINES, start=part.start, end=part.end):
            return str(path), lines
    return "", ()


def _of_task(run: Run, task: str) -> Why:
    run.expect_tasks()
    with LedgerReader(run.folder.ledger) as ledger:
        row = ledger.task(run.task_number(ledger, task))
        attempts, parts = ledger.attempts(row.task_id), ledger.log_parts(row.task_id)
        trace = ledger.trace_of(row.task_id) or ""
    kind = "search" if run.stored.is_search else run.stored.kind
    number, quoted = str(row.task_id), shell_word(run.path)
    bad = [one for one in attempts if one.outcome not in (Outcome.OK, Outcome.STOPPED)]
    found = tuple(_causes_of_attempts(bad, trace))
    now = {"ready": "waiting", "claimed": "running" if is_held(run.folder) else "waiting"}
    state = now.get(word := row.state.name.lower(), word)
    log, lines = _printed(run, parts)
    tries = [_ADVICE[Outcome(one.outcome)] for one in found[-1:] if one.outcome in _ADVICE]
    tries += [f"muster logs {quoted} {number}"] if parts else []
    tries += {
        "failed": [_again(run)], "cancelled": [_again(run, cancelled=True)],
        "waiting": [f"muster why {quoted}"],
    }.get(state, [])  # fmt: skip
    # A search may end a trial by what it had logged when its run was killed, with its attempt.
    none = REASONS[Outcome.STOPPED] if row.state is TaskState.STOPPED else "has not been tried yet"
    last = REASONS[Outcome(attempts[-1].outcome)] if attempts else none
    if row.state is TaskState.CLAIMED:
        before = f"; before that it {last}" if attempts else ""
        last = ("runs now" if state == "running" else "was begun when its run ended") + before
    return Why(
        path=str(run.path), kind=kind, state=state, task=number,
        sentence=f"{task_label(row.task_id, row.payload)}: it {last}.", causes=found, log=log,
        lines=lines, tries=tuple(tries),
    )  # fmt: skip


def _causes_of_attempts(attempts: list[AttemptRow], trace: str) -> Iterator[Cause]:
    """Each way in which a task has failed, the last one with its traceback."""
    texts = [(one.message or REASONS[Outcome(one.outcome)]).splitlines()[0] for one in attempts]
    for text in dict.fromkeys(texts):
        alike = [one for one, said in zip(attempts, texts, strict=True) if said == text]
        last = alike[-1]
        yield Cause(
            text, len(alike), "attempts", trace if last is attempts[-1] else "",
            outcome=last.outcome, first_s=alike[0].started_s, last_s=last.started_s + last.seconds,
        )  # fmt: skip
