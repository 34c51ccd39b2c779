"""How a run stands, whatever kind it is: one word, and how much of it is done.

All of it is read from the run's files, without its lock; what only the ledger knows is passed in.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Literal, NamedTuple

from muster.base.codec import read_object
from muster.base.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_REQUEUE, EXIT_USAGE
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
        planned = last_start(folder).begin.get("tasks")
        total = max(planned, known) if isinstance(planned, int) else None
    word = "running" if is_running else _word_of_tasks(folder, record, tasks)
    return State(word, tasks.done + tasks.stopped, total, unit)


def _word_of_tasks(folder: RunFolder, record: RunRecord, tasks: Tasks) -> Word:
    if tasks.open or not tasks.is_whole:
        ended = (tasks.done, tasks.failed, tasks.stopped)
        known = ended if tasks.is_whole else (*ended, tasks.cancelled, tasks.open)
        return "stopped" if any(known) or last_start(folder).begin else "not begun"
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
    if code is None and not last_start(folder).begin:
        # An older muster trained here, in its caller's process, and kept no journal of it.
        has_steps = folder.metrics.exists() and folder.metrics.stat().st_size > 0
        return (
            "done" if folder.training_results.exists() else "stopped" if has_steps else "not begun"
        )
    word = last_word(folder) if code is not None else {}
    if word.get("ending") == "refused":  # a mistake, which may show only after many steps
        return "refused" if word.get("phase", "setup") == "setup" else "failed"
    if code == EXIT_USAGE:
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
    return read_object(folder.ending_json)


def _training(folder: RunFolder, *, is_running: bool) -> Mapping[str, Any] | None:
    """The last picture of a training that runs, else its results, else its last recorded step.

    None for a folder in which nothing was trained.
    """
    picture = read_object(folder.status_json)
    if is_running and picture:
        return picture
    if results := read_object(folder.training_results):
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


class Start(NamedTuple):
    """What the journal of a run tells of one of its starts on one node, line by line. ``end`` is
    empty where nothing tells of an end: it was killed, or is at work.
    """

    node: int
    lines: list[dict[str, Any]]

    @property
    def begin(self) -> dict[str, Any]:
        return next((line for line in self.lines[:1] if line.get("event") == "start"), {})

    @property
    def end(self) -> dict[str, Any]:
        return next((line for line in reversed(self.lines) if line.get("event") == "end"), {})


def starts_of(folder: RunFolder) -> list[Start]:
    """The starts of a run, of all its nodes, in the order in which they began."""
    found: list[Start] = []
    last: dict[int, Start] = {}
    for line in read_journal(folder.events):
        node = line.get("node", 0)
        node = node if isinstance(node, int) else -1  # damaged, and of no node
        if line.get("event") == "start" or node not in last:
            last[node] = Start(node, [])
            found.append(last[node])
        last[node].lines.append(line)
    return found


def last_start(folder: RunFolder) -> Start:
    """The last start on the first node; one without lines where the journal tells of none."""
    return next((one for one in reversed(starts_of(folder)) if one.node == 0), Start(0, []))


def last_ending(folder: RunFolder) -> int | None:
    """The exit code of the last start of a gang; None where it has not ended, or never began."""
    code = last_start(folder).end.get("exit_code")
    return code if isinstance(code, int) else None


def is_between_starts(folder: RunFolder) -> bool:
    """Whether ranks have ended only to begin again, perhaps on other devices, and are about to."""
    try:
        if time.time() - folder.events.stat().st_mtime >= _BETWEEN_STARTS_S:
            return False
    except OSError:
        return False
    end = last_start(folder).end
    return bool(end.get("is_moving") or end.get("starts_again"))


def last_report(folder: RunFolder) -> tuple[str, ...]:
    """What the launcher said when the last start of a gang ended badly."""
    report = last_start(folder).end.get("report")
    return tuple(map(str, report)) if isinstance(report, list) else ()
