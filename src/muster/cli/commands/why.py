"""``muster why``: the state of a run or a task, its cause, what it printed last, what to try."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated

from muster.api.experiment import find_experiment, why_experiment
from muster.api.runs import open_run
from muster.api.why import Cause, Why, why
from muster.base.errors import EXIT_OK, EXIT_SETUP
from muster.base.flags import Flag
from muster.base.shown_text import count
from muster.cli import output
from muster.cli.flags import LookFlags
from muster.cli.parse import parse

_MOST_CAUSES, _NUM_TRACE = 5, 8
_WHY = """Say why a run stands as it does: its state, the cause, the last lines of its log, what to
try.

Examples:
  muster why runs/train-1a2b3c
  muster why runs/train-1a2b3c 12
  muster why digits-20260131-090500 --json
"""


@dataclass(frozen=True, kw_only=True)
class _Why(LookFlags):
    """Which run, and which of its tasks."""

    task: Annotated[str | None, Flag(is_positional=True, metavar="[N]")] = None
    """A task's number or the start of its key; of a training or a program a rank."""


def main(argv: list[str]) -> int:
    flags = parse(_Why, argv, "why", _WHY)
    experiment = find_experiment(flags.run) if flags.task is None else None
    found = (
        why(open_run(flags.run), flags.task) if experiment is None else why_experiment(experiment)
    )
    if flags.json:
        record = asdict(found)
        output.say_json({**record, "causes": [cause._asdict() for cause in found.causes]})
    if found.state == "unreadable":  # told as every other command does
        output.complain("\nHint: ".join((found.sentence, *found.tries)))
        return EXIT_SETUP
    for line in () if flags.json else _lines(found):
        output.say(line)
    return EXIT_OK


def _lines(found: Why) -> list[str]:
    what = f", task {found.task}" if found.task else ""
    lines = [f"{found.path}{what}: {found.state}", f"  {found.sentence}"]
    lines += [f"  {reason}" for reason in found.reasons]
    known = _shown(found.causes)
    for cause in known[:_MOST_CAUSES]:
        lines += [f"  {_how_many(cause)}{cause.text}"]
        if cause.named:
            more = ", …" if cause.failed > len(cause.named) else ""
            lines += [f"    tasks: {', '.join(cause.named)}{more}"]
    if len(known) > _MOST_CAUSES:
        more = count(len(known) - _MOST_CAUSES, "more cause")
        lines += [f"  {more}: muster errors {found.path}"]
    trace = _trace(found)
    if trace:
        lines += ["  where it failed:", *(f"    {line}" for line in trace)]
    if found.lines:
        lines += [f"  the last lines of {found.log}:", *(f"    {line}" for line in found.lines)]
    if found.tries:
        lines += ["  what to try:", *(f"    {line}" for line in found.tries)]
    return lines


def _shown(causes: Sequence[Cause]) -> list[Cause]:
    """Without the error of a rank that the report of the start has in its first line."""
    heads = [one.text for one in causes if one.unit == "starts"]
    return [
        one for one in causes
        if one.unit != "ranks" or not any(one.text.partition(": ")[2] in head for head in heads)
    ]  # fmt: skip


def _trace(found: Why) -> list[str]:
    """The end of the traceback of a task's last failure, where the log does not have it."""
    traces = [one.trace for one in found.causes if one.unit == "attempts" and one.trace]
    lines = traces[0 if not found.task else -1].rstrip().splitlines() if traces else []
    return lines[-_NUM_TRACE:] if not set(lines) <= set(found.lines) else []


def _how_many(cause: Cause) -> str:
    if cause.failed:
        return f"{count(cause.failed, 'failed task')}: "
    if cause.unit == "records" or (cause.unit == "attempts" and cause.num > 1):
        return f"{count(cause.num, cause.unit.removesuffix('s'))}: "
    return ""
