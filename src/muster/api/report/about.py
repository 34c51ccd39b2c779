"""What every report says about a run: how it stands, what failed, how it was set up, what it took.

Functions that read the run folder say so; the others are pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

from muster.api.report.content import Block, Facts, Health, Listing, Table, Text, facts_of
from muster.api.runs import Status
from muster.base.clock import human_duration, iso_utc
from muster.base.errors import EXIT_OK
from muster.base.journal import read_journal
from muster.base.shown_text import count, hide_secrets
from muster.farm.ledger.records import FailureGroup
from muster.run.folder import RunFolder
from muster.run.record import RunRecord
from muster.run.state import last_ending, last_report, starts_of

_MOST_FAILURES = 20
_MOST_EXAMPLES = 200
_MOST_LINES = 60


@dataclass
class Effort:
    """Time and memory of tasks, added up per device. ``seconds``: of the last attempts."""

    seconds: dict[str, float] = field(default_factory=dict)
    tasks: Counter[str] = field(default_factory=Counter)
    peak_mib: dict[str, float] = field(default_factory=dict)

    def add(self, system: Mapping[str, Any]) -> None:
        """``system``: what muster says about a task in the exported table."""
        device, seconds, peak = system["device"], system["seconds"], system["peak_mib"]
        if device is None or seconds is None:
            return
        self.tasks[device] += 1
        self.seconds[device] = self.seconds.get(device, 0.0) + seconds
        if peak is not None:
            self.peak_mib[device] = max(peak, self.peak_mib.get(device, 0.0))

    def table(self) -> Table | None:
        if not self.tasks:
            return None
        rows = tuple(
            (name, num, self.seconds[name], self.seconds[name] / num, self.peak_mib.get(name))
            for name, num in self.tasks.items()
        )
        names = ("device", "tasks", "seconds in tasks", "seconds per task", "peak memory (MiB)")
        return Table("Tasks by device", names, rows)


# ---------------------------------------------------------------------- how it stands


def farm_state(status: Status) -> tuple[str, Health]:
    """A sentence with the counts of tasks, for a sweep."""
    counts = status.counts
    shown = ", ".join(f"{number:,} {name}" for name, number in counts.items() if number)
    of = f"{shown or 'nothing done'} of {count(status.total, 'task')}"
    more = "" if status.is_enqueued or not status.total else " (not all tasks are listed yet)"
    if status.is_running:
        return f"Still running: {of}{more}. What is missing is left out below.", Health.OPEN
    if counts["waiting"] or counts["running"] or not status.total:
        return f"Unfinished: {of}{more}. What is missing is left out below.", Health.OPEN
    if counts["failed"]:
        return f"Finished with failures: {of}.", Health.BAD
    if counts["cancelled"]:
        return f"Cancelled: {of}.", Health.OPEN
    return f"Finished: {of}.", Health.GOOD


def gang_state(folder: RunFolder, status: Status) -> tuple[str, Health]:
    """A sentence on how a training or a program stands."""
    match status.state:
        case "running":
            return "Still running.", Health.OPEN
        case "starting again":
            return "It is being started again.", Health.OPEN
        case "done":
            return "Finished.", Health.GOOD
        case "saved":
            return "Unfinished: it saved its state and can go on.", Health.OPEN
        case "not begun":
            return "It has not begun.", Health.OPEN
        case "refused":
            return "It was refused at its start: nothing was done.", Health.BAD
        case "stopped":
            return "Unfinished: it has not come to an end.", Health.OPEN
    return f"Failed with exit code {last_ending(folder)}.", Health.BAD


# ---------------------------------------------------------------------- what failed


def failure_blocks(groups: Sequence[FailureGroup]) -> list[Block]:
    """Failed attempts by cause, those that left failed tasks first."""
    blocks: list[Block] = []
    for group in groups[:_MOST_FAILURES]:
        first = group.message.splitlines()[0] if group.message else group.outcome
        tasks = count(group.num_failed, "failed task")
        if not group.num_failed:
            tasks = "no task failed in the end"
        summary = f"{first} ({tasks}, {count(group.num_attempts, 'attempt')})"
        trace = _last_lines(group.trace or group.message)
        blocks.append(Listing(summary, f"{trace}\ntasks: {', '.join(group.named)}"))
    if len(groups) > _MOST_FAILURES:
        blocks.append(Text(f"{len(groups) - _MOST_FAILURES:,} more causes: muster errors RUN."))
    return blocks


def gang_failures(folder: RunFolder) -> list[Block]:
    """The report of the last start, and the errors that its ranks wrote down. Reads the folder."""
    from muster.api.report.rank_failures import rank_failures

    blocks: list[Block] = []
    if report := last_report(folder):
        blocks += [Text(report[0]), Listing("Report of the last start", "\n".join(report))]
    if last_ending(folder) == EXIT_OK:
        return blocks
    found = rank_failures(folder)
    for rank, error in list(found.errors.items())[:_MOST_FAILURES]:
        said = f"{error.type}: {error.message}"
        text = _last_lines("\n".join((*error.frames, said)))
        blocks.append(Listing(f"{found.who(rank).capitalize()}: {said}", text))
    return blocks


class Rejects(NamedTuple):
    """``num`` records that a stage of a map has rejected for one reason, and one of them."""

    stage: str
    reason: str
    num: int
    example: str


def rejects(folder: RunFolder) -> list[Rejects]:
    """Rejected records by stage and reason, the most frequent first. Reads ``errors.jsonl``."""
    causes: Counter[tuple[str, str]] = Counter()
    examples: dict[tuple[str, str], str] = {}
    for line in read_journal(folder.errors_jsonl):
        cause = (str(line.get("stage")), str(line.get("reason")))
        if cause not in causes and len(causes) >= 10_000:
            cause = ("", "other reasons")
        causes[cause] += 1
        if cause not in examples and len(examples) < _MOST_EXAMPLES:
            text = f"record {line.get('id')}\n{line.get('traceback') or ''}"
            examples[cause] = _last_lines(text)
    return [
        Rejects(stage, reason, num, examples.get((stage, reason), "") or reason)
        for (stage, reason), num in causes.most_common()
    ]


def record_failures(folder: RunFolder) -> list[Block]:
    """Records of a map that were rejected, by stage and reason."""
    causes = rejects(folder)
    blocks: list[Block] = []
    for cause in causes[:_MOST_FAILURES]:
        where = f" in the stage {cause.stage}" if cause.stage else ""
        summary = f"{count(cause.num, 'record')}{where}: {cause.reason}"
        blocks.append(Listing(summary, cause.example))
    if len(causes) > _MOST_FAILURES:
        more = len(causes) - _MOST_FAILURES
        blocks.append(Text(f"{more:,} more reasons are in {folder.errors_jsonl.name}."))
    return blocks


def _last_lines(text: str) -> str:
    lines = text.rstrip().splitlines()
    if len(lines) <= _MOST_LINES:
        return "\n".join(lines)
    return "\n".join((f"({len(lines) - _MOST_LINES:,} lines before)", *lines[-_MOST_LINES:]))


# ---------------------------------------------------------------------- how it was set up


def setting_blocks(groups: Mapping[str, Mapping[str, Any]]) -> list[Block | None]:
    """Tables of settings by caption. What looks like a key or a password is not shown."""
    return [
        facts_of(caption, hide_secrets(values), are_given=True)
        for caption, values in groups.items()
    ]


def environment_blocks(stored: RunRecord, hosts: Mapping[str, Sequence[str]]) -> list[Block | None]:
    """What ran it: versions, machine, code. ``hosts``: machine → its devices, where known."""
    machines = {
        host: ", ".join(f"{number} × {name}" for name, number in Counter(devices).items())
        or "no GPU was seen"
        for host, devices in hosts.items()
    }
    return [
        facts_of("Software", stored.environment),
        facts_of("Machines", machines),
        facts_of(
            "Run",
            {
                "run id": stored.run_id,
                "first started": iso_utc(stored.created_s),
                "working folder": stored.cwd,
            },
        ),
        facts_of("Code (hash of the source)", {k: v for k, v in stored.code.items() if v}),
    ]


# ---------------------------------------------------------------------- what it took


def time_facts(folder: RunFolder) -> Facts | None:
    """How often the run was started, and for how long it worked. Reads the run's journal.

    A start without an end was killed: how long it worked is not known, and the page says so.
    """
    starts = [one for one in starts_of(folder) if one.node == 0 and moment(one.begin) is not None]
    if not starts:
        return None
    ended = [one for one in starts if moment(one.end) is not None]
    known = [(moment(one.end) or 0.0) - (moment(one.begin) or 0.0) for one in ended]
    parts = []
    if known:  # the journal knows whole seconds
        parts.append(f"about {human_duration(max(1.0, sum(known)))}")
    if len(known) < len(starts):
        parts.append(f"{count(len(starts) - len(known), 'start')} without a known end")
    facts = {
        "starts": len(starts),
        "last start": starts[-1].begin["time"],
        "time at work": ", and ".join(parts),
    }
    return facts_of("Time", facts)


def moment(line: Mapping[str, Any]) -> float | None:
    """When a line of the journal was written (seconds since 1970); None for a damaged one."""
    with suppress(ValueError, OverflowError):
        found = datetime.fromisoformat(str(line.get("time")))
        return found.timestamp() if found.tzinfo is not None else None
    return None


def log_blocks(folder: RunFolder) -> list[Block]:
    """The last lines that rank 0 printed. Reads its log."""
    from muster.base.journal import last_lines

    found = last_lines(folder.rank_log(0), 30)
    return [Listing("The last lines that rank 0 printed", "\n".join(found))] if found else []
