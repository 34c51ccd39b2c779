"""What is read from a ledger, in rows of their own types."""

from __future__ import annotations

from typing import NamedTuple

from muster.farm.task import TaskState


class TaskRow(NamedTuple):
    """A task with its last attempt and its result, as exported."""

    task_id: int
    key: bytes
    target: str
    payload: bytes
    state: TaskState
    attempts: int
    value: bytes | None
    has_files: bool
    seconds: float | None
    device: str | None
    outcome: str | None
    message: str | None
    peak_mib: float | None
    started_s: float | None
    code: str | None = None  # see `muster.base.code`; None where an older muster ran it


class AttemptRow(NamedTuple):
    """One recorded attempt of a task, and where it was made."""

    token: int
    outcome: str
    message: str | None
    slot: str
    host: str
    started_s: float
    seconds: float
    peak_mib: float | None


class LogPart(NamedTuple):
    """Where the output of one attempt is."""

    token: int
    outcome: str
    log: str
    start: int
    end: int


class MetricsRow(NamedTuple):
    """What an attempt has logged at once; `muster.farm.metrics` makes points of it."""

    frame_id: int
    task_id: int
    token: int
    body: bytes


class FailureGroup(NamedTuple):
    """Failed attempts of ``num_tasks`` with the same cause; ``num_failed`` of them stay failed.

    ``tasks``: the keys of the first that stay failed, or of the first of all where none does;
    ``named``: what they are called.
    ``first_s`` and ``last_s``: when the first and the last of the attempts ended.
    """

    outcome: str
    message: str
    trace: str
    num_attempts: int
    num_failed: int
    tasks: tuple[str, ...]
    named: tuple[str, ...]  # the same, by their numbers and parameters
    first_s: float | None = None
    last_s: float | None = None
    num_tasks: int = 0
    number: int = 0  # of the cause, as `failure_times` has it


class WorkSpan(NamedTuple):
    """When a slot worked at ``num`` attempts; ``state``: how they ended, done, stopped or failed.

    ``task``: the key of the first of them.
    """

    slot: str
    begin_s: float
    end_s: float
    state: str
    num: int
    task: str


class RecentTask(NamedTuple):
    """A task whose attempt ended: its key, what it is called, done, stopped or failed."""

    key: str
    name: str
    state: str
    seconds: float
    ended_s: float
