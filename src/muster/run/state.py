"""How a run stands, whatever kind it is: one word, and how much of it is done.

All of it is read from the run's files, without its lock; what only the ledger knows is passed in.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

from muster.base.codec import read_json
from muster.base.errors import (
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_REQUEUE,
    EXIT_USAGE,
    MusterError,
)
from muster.base.journal import last_lines, read_journal
from muster.run.folder import RunFolder
from muster.run.record import RunRecord

#: "saved": it stopped and has saved what it goes on from; "refused": it was not allowed to begin;
#: "not written": a map's records are done and its output is not; "queued": SLURM lets it wait;
#: "starting again": ranks have ended only to begin anew, perhaps on other devices;
#: "not collected": no element of an array is at work, and the run's own tasks are still open.
Word = Literal[
    "not begun", "refused", "queued", "running", "starting again", "stopped", "saved",
    "not collected", "not written", "cancelled", "failed", "done",
]  # fmt: skip


#: Until a start that was announced has the run's lock; a killed one never has.
_BETWEEN_STARTS_S = 20.0


class Tasks(NamedTuple):
    """What a ledger says. ``is_whole``: all tasks of the plan are listed in it."""

    done: int = 0
    failed: int = 0
    cancelled: int = 0
    open: int = 0
    is_whole: bool = False
    stopped: int = 0  # early, on purpose


class State(NamedTuple):
    """``num_total``: None where it is not known; ``unit``: what is counted, such as tasks or steps.

    ``training``: what a training says of itself.
    """

    word: Word
    num_done: int | None
    num_total: int | None
    unit: str
    training: Mapping[str, Any] | None = None


def state_of(folder: RunFolder, record: RunRecord, tasks: Tasks, *, is_running: bool) -> State:
    """How a run of any kind stands. ``tasks``: empty for one that has ranks."""
    if not record.is_gang:
        return _of_tasks(folder, record, tasks, is_running=is_running)
    word: Word = "running" if is_running else _word_of_ranks(folder)
    if record.kind == "run":
        return State(word, None, None, "")
    trained = _training(folder, is_running=word in ("running", "starting again"))
    if trained is None:
        return State(word, 0, None, "steps")
    done, total = _steps_of(trained, record)
    if word == "done":  # it may have ended before its last step, where it no longer improved
        total = done
    return State(word, done, total, "steps", trained)


def state_of_array(word: Word, *, num_open: int, num_running: int, num_queued: int) -> Word:
    """The word for a run whose elements do its work, where its own files say ``word``."""
    if word == "running":
        return word
    if num_running or num_queued:
        return "running" if num_running else "queued"
    return "not collected" if num_open else word


def _of_tasks(folder: RunFolder, record: RunRecord, tasks: Tasks, *, is_running: bool) -> State:
    unit = "chunks" if record.kind == "map" else "tasks"
    known = tasks.done + tasks.failed + tasks.cancelled + tasks.open + tasks.stopped
    total: int | None = known
    if not tasks.is_whole:
        planned = _planned(folder)
        total = None if planned is None else max(planned, known)
    word = "running" if is_running else _word_of_tasks(folder, record, tasks)
    return State(word, tasks.done + tasks.stopped, total, unit)


def _word_of_tasks(folder: RunFolder, record: RunRecord, tasks: Tasks) -> Word:
    if tasks.open or not tasks.is_whole:
        ended = (tasks.done, tasks.failed, tasks.stopped)
        known = ended if tasks.is_whole else (*ended, tasks.cancelled, tasks.open)
        return "stopped" if any(known) or _last(folder, "start") is not None else "not begun"
    if tasks.cancelled:
        return "cancelled"
    if tasks.failed:
        return "failed"
    if record.kind == "map" and not folder.published_json.exists():
        return "not written"
    return "done"


def _word_of_ranks(folder: RunFolder) -> Word:
    if is_between_starts(folder):
        return "starting again"
    code = last_ending(folder)
    if code is None and _last(folder, "start") is None:
        # An older muster trained here, in its caller's process, and kept no journal of it.
        has_steps = folder.metrics.exists() and folder.metrics.stat().st_size > 0
        return (
            "done" if folder.training_results.exists() else "stopped" if has_steps else "not begun"
        )
    if code == EXIT_USAGE or (code is not None and last_word(folder).get("ending") == "refused"):
        return "refused"
    words: dict[int | None, Word] = {
        EXIT_OK: "done",
        EXIT_REQUEUE: "saved" if has_saved(folder) else "stopped",
        EXIT_INTERRUPTED: "stopped",
        None: "stopped",
    }
    return words.get(code, "failed")


def has_saved(folder: RunFolder) -> bool:
    """Whether ranks go on from something: a checkpoint, or what a program says it has saved."""
    return any(folder.checkpoints.glob("step-*")) or last_word(folder).get("ending") == "requeue"


def last_word(folder: RunFolder) -> dict[str, Any]:
    """What a rank has left behind about how it ended: `ending`, and perhaps `message`."""
    return _object(folder.ending_json, "last word of the ranks")


def _training(folder: RunFolder, *, is_running: bool) -> Mapping[str, Any] | None:
    """The last picture of a training that runs, else its results, else its last recorded step.

    None for a folder in which nothing was trained.
    """
    picture = _object(folder.status_json)
    if is_running and picture:
        return picture
    if results := _object(folder.training_results):
        return results
    for line in reversed(last_lines(folder.metrics, 50)):
        with suppress(ValueError, RecursionError):
            step = json.loads(line)
            if isinstance(step, dict) and step.get("kind") in ("train", "update"):
                # The total is in a picture that a kill has left, or was said at the stop.
                known = {**last_word(folder), **picture}
                return {"total_steps": known.get("total_steps"), **step}
    return None


def live_picture(folder: RunFolder) -> Mapping[str, Any] | None:
    """The coordinator's last picture of the run; None where it is missing or damaged."""
    try:
        live: dict[str, Any] = json.loads(folder.status_json.read_bytes())
        is_whole = isinstance(live["num_running"], int) and all(
            isinstance(line[name], str)
            for line in live["workers"]
            for name in ("slot", "state", "task", "progress")
        )
    except (OSError, ValueError, RecursionError, LookupError, TypeError):
        return None
    return live if is_whole else None


def _object(path: Path, what: str = "state of a training") -> dict[str, Any]:
    """A small file of the run that may be missing or damaged, and says nothing then."""
    with suppress(MusterError):
        found = read_json(path, what)
        if isinstance(found, dict):
            return found
    return {}


def _steps_of(trained: Mapping[str, Any], record: RunRecord) -> tuple[int, int | None]:
    """The steps that are done, and of how many; for an agent, those of its environments."""
    if record.kind == "agent":
        done = trained.get("env_steps", trained.get("steps", trained.get("step")))
        config = record.spec.get("config")
        total = config.get("num_steps") if isinstance(config, dict) else None
    else:
        done = trained.get("steps", trained.get("step"))
        total = trained.get("total_steps")
    return done if _is_count(done) else 0, total if _is_count(total) else None


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def last_ending(folder: RunFolder) -> int | None:
    """The exit code of the last start of a gang; None where it has not ended, or never began."""
    last = _last(folder, "start", "end")
    if last is None or last["event"] != "end":
        return None
    code = last.get("exit_code")
    return code if isinstance(code, int) else None


def is_between_starts(folder: RunFolder) -> bool:
    """Whether ranks have ended only to begin again, perhaps on other devices, and are about to."""
    try:
        is_recent = time.time() - folder.events.stat().st_mtime < _BETWEEN_STARTS_S
    except OSError:
        return False
    last = _last(folder, "start", "end") if is_recent else None
    if last is None or last["event"] != "end":
        return False
    return bool(last.get("is_moving") or last.get("starts_again"))


def last_report(folder: RunFolder) -> tuple[str, ...]:
    """What the launcher said when the last start of a gang ended badly."""
    last = _last(folder, "start", "end")
    report = last.get("report") if last is not None and last["event"] == "end" else None
    return tuple(map(str, report)) if isinstance(report, list) else ()


def _planned(folder: RunFolder) -> int | None:
    start = _last(folder, "start")
    tasks = start.get("tasks") if start is not None else None
    return tasks if isinstance(tasks, int) else None


def _last(folder: RunFolder, *events: str) -> dict[str, Any] | None:
    """The last of these events in the run's journal, on its first node."""
    found = None
    for line in read_journal(folder.events):
        if line.get("event") in events and line.get("node", 0) == 0:
            found = line
    return found
