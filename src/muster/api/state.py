"""How a run stands, whatever kind it is: one word, and how much of it is done."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from muster.api.training_state import training_state
from muster.base.codec import read_json
from muster.base.errors import (
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_REQUEUE,
    EXIT_USAGE,
    MusterError,
)
from muster.base.journal import read_journal
from muster.farm.model import TaskState
from muster.run.folder import RunFolder
from muster.run.record import RunRecord

#: "saved": stopped where it goes on from; "refused": it was not let begin; "not written": a map's
#: records are done and its output is not.
Word = Literal[
    "not begun", "refused", "running", "stopped", "saved", "not written", "cancelled", "failed",
    "done",
]  # fmt: skip


class State(NamedTuple):
    """``num_total``: None where it is not known; ``unit``: of the numbers, such as tasks or steps.

    ``training``: what a training says of itself.
    """

    word: Word
    num_done: int | None
    num_total: int | None
    unit: str
    training: Mapping[str, Any] | None = None


def state_of_tasks(
    folder: RunFolder,
    stored: RunRecord,
    counts: Mapping[TaskState, int],
    *,
    is_running: bool,
    is_enqueued: bool,
) -> State:
    """Of a sweep or a map. ``is_enqueued``: all its tasks are listed in its ledger."""
    unit = "chunks" if stored.kind == "map" else "tasks"
    known = sum(counts.values())
    total: int | None = known
    if not is_enqueued:
        planned = _planned(folder)
        total = None if planned is None else max(planned, known)
    word = _word_of_tasks(folder, stored, counts, is_enqueued=is_enqueued)
    return State("running" if is_running else word, counts[TaskState.DONE], total, unit)


def _word_of_tasks(
    folder: RunFolder, stored: RunRecord, counts: Mapping[TaskState, int], *, is_enqueued: bool
) -> Word:
    if not is_enqueued:
        has_begun = any(counts.values()) or _last(folder, "start") is not None
        return "stopped" if has_begun else "not begun"
    if counts[TaskState.READY] or counts[TaskState.CLAIMED]:
        num_ended = counts[TaskState.DONE] + counts[TaskState.FAILED]
        has_begun = num_ended > 0 or _last(folder, "start") is not None
        return "stopped" if has_begun else "not begun"
    if counts[TaskState.CANCELLED]:
        return "cancelled"
    if counts[TaskState.FAILED]:
        return "failed"
    if stored.kind == "map" and not folder.published_json.exists():
        return "not written"
    return "done"


def state_of_ranks(folder: RunFolder, stored: RunRecord, *, is_running: bool) -> State:
    """Of a training, of a model or an agent, or of a program."""
    word: Word = "running" if is_running else _word_of_ranks(folder)
    if stored.kind == "run":
        return State(word, None, None, "")
    trained = training_state(folder, is_running=is_running)
    if trained is None:
        return State(word, 0, None, "steps")
    done, total = _steps_of(trained, stored)
    if word == "done":  # it may have ended before its last step: no improvement
        total = done
    return State(word, done, total, "steps", trained)


def _word_of_ranks(folder: RunFolder) -> Word:
    code = last_ending(folder)
    if code is None and _last(folder, "start") is None:
        # Trained inside its caller's process, before that kept a journal.
        has_steps = folder.metrics.exists() and folder.metrics.stat().st_size > 0
        return (
            "done" if folder.training_results.exists() else "stopped" if has_steps else "not begun"
        )
    if code == EXIT_USAGE or (code is not None and _was_refused(folder)):
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
    return any(folder.checkpoints.glob("step-*")) or _last_word(folder) == "requeue"


def _was_refused(folder: RunFolder) -> bool:
    return _last_word(folder) == "refused"


def _last_word(folder: RunFolder) -> str:
    try:
        word = read_json(folder.ending_json, "last word of the ranks")
    except MusterError:
        return ""
    return str(word.get("ending")) if isinstance(word, dict) else ""


def _steps_of(trained: Mapping[str, Any], stored: RunRecord) -> tuple[int, int | None]:
    """Steps that are done, and of how many; an agent's are those of its environments."""
    if stored.kind == "agent":
        done = trained.get("env_steps", trained.get("steps", trained.get("step")))
        config = stored.spec.get("config")
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
