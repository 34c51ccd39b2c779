"""``muster logs``: what a task, a rank or all workers have printed, and what they print next; and
``muster why``: the state of a run or a task, its cause, what it printed last, what to try.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

from muster.api.experiments import watching
from muster.api.experiments.experiment import find_experiment, why_experiment
from muster.api.experiments.watching import folders_of, is_at_work, latest, open_watched, pause_s
from muster.api.look.listing import find_run
from muster.api.look.ranks import rank_log
from muster.api.look.why import Cause, Why, why
from muster.api.runs import Run
from muster.base.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_SETUP, SetupError, UsageError
from muster.base.flags import Flag
from muster.base.shown_text import count, shell_word, shortened
from muster.cli import output
from muster.cli.flags import LookFlags
from muster.cli.parse import RunPlace, parse
from muster.farm.ledger.read import LedgerReader
from muster.farm.task import TaskState
from muster.run.state import live_picture

_TURN_S = 0.2
_BLOCK = 1 << 16
_FINAL = ("failed", "cancelled", "refused")
#: A line that is longer is shown in pieces.
_LONGEST_LINE = 1 << 20


@dataclass(frozen=True, kw_only=True)
class _Logs(RunPlace):
    """Which run, which of its tasks, and how much."""

    task: Annotated[str | None, Flag(is_positional=True, metavar="[N]")] = None
    """The task's number or the start of its key, as `muster errors` and the table name it; of a
    training or a program the rank, by default the one that failed first. Of a map that runs stage
    by stage, the task with this number of each stage; RUN/stages/0 names the first stage alone."""
    follow: Annotated[bool, Flag(aliases=("f",))] = False
    """Go on with what is printed from now on, also after the run was resumed, until all is done;
    without a task: of all workers, each line with its worker's name."""
    lines: Annotated[int | None, Flag(aliases=("n",), metavar="N")] = None
    """Begin with the last N lines; without a task: those of each worker."""


_HELP = """Show what a task printed, one part per attempt, or what a rank printed.

A pipe or a file gets every byte as it was printed; a terminal gets colours and no other control
sequence.

Examples:
  muster logs runs/train-1a2b3c 12
  muster logs digits-20260131-090500 0
  muster logs train-1a2b3c -f -n 20
"""


class Part(NamedTuple):
    """Bytes of a file; ``end`` is None while more may come. ``prefix``: in front of each line."""

    title: str
    path: Path
    start: int = 0
    end: int | None = None
    prefix: bytes = b""


def main(argv: list[str]) -> int:
    flags = parse(_Logs, argv, "logs", _HELP)
    if flags.lines is not None and flags.lines < 0:
        raise UsageError(f"--lines {flags.lines} is too small.", hint="write 0 or more.")
    run = open_watched(flags.run)
    parts = _parts(run, flags)
    shown = Shown(flags.lines)
    for part in parts():
        shown.go_on(part)
    shown.num_lines = None  # of what comes now, all
    if flags.follow:
        try:
            _follow(run, flags, parts, shown)
        except KeyboardInterrupt:
            return EXIT_INTERRUPTED
    elif not run.stored.is_gang and flags.task is not None and not shown.has_begun:
        logs = latest(run).folder.logs
        output.say(f"This task has not ended an attempt yet; its output is in {logs}.")
    shown.end()
    if not run.stored.is_gang and flags.task is not None:
        for title, one, task in _tasks(run, flags):
            if trace := one.trace(task):
                output.say(f"--- {title}error\n{trace.rstrip()}")
    return EXIT_OK


def _stages(run: Run, flags: _Logs) -> list[Run]:
    """The run, or those of its stages that have begun, where the command names no single one."""
    if Path(flags.run).absolute().parent.name == "stages":
        return [run]
    return [Run(folder.path) for folder in folders_of(run) if folder.exists()]


def _tasks(run: Run, flags: _Logs) -> list[tuple[str, Run, str]]:
    """The run that has the task that is named, or each stage that has one, with its title and the
    task's number. Raises UsageError where there is none.
    """
    assert flags.task is not None
    stages, found, error = _stages(run, flags), list[tuple[str, Run, str]](), None
    for number, one in enumerate(stages, 1):
        title = f"stage {number}, " if len(stages) > 1 else ""
        try:
            one.expect_tasks()
            with LedgerReader(one.folder.ledger) as ledger:
                found.append((title, one, str(one.task_number(ledger, flags.task))))
        except UsageError as refusal:
            error = refusal
    if error is not None and not found:
        raise error
    return found


def _parts(run: Run, flags: _Logs) -> Callable[[], list[Part]]:
    """What asks anew which parts there are; raises UsageError where there can be none."""
    if run.stored.is_gang:
        may_come, found = flags.follow and is_at_work(run), list[Part]()

        def of_rank() -> list[Part]:
            if not found and (not may_come or any(run.folder.logs.glob("rank-*.log"))):
                number, path = rank_log(run.folder, flags.task)
                found.append(Part(f"--- rank {number}, {path}", path))
            return found

        return of_rank
    if flags.task is not None:
        return lambda: [part for one in _tasks(run, flags) for part in _of_task(*one)]
    if not (flags.follow or flags.lines is not None):
        named, quoted = "; ".join(run.failed_tasks()), shell_word(flags.run)
        raise UsageError(
            f"{flags.run} has many tasks: say whose log you mean.",
            hint=f"muster logs {quoted} N, with N the number of a task"
            + (f". Failed: {named}." if named else ", as in the table's row or its column `task`.")
            + f" What all workers print: muster logs {quoted} -f",
        )
    run.expect_tasks()
    return lambda: [
        Part("", path, prefix=f"{path.stem}: ".encode())
        for one in _stages(run, flags)
        for path in sorted(one.folder.logs.glob("worker-*.log"))
    ]


def _of_task(title: str, run: Run, task: str) -> list[Part]:
    """The attempts that are recorded, and what the worker that is at it has printed since."""
    logs = run.folder.logs
    with LedgerReader(run.folder.ledger) as ledger:
        row = ledger.task(int(task))
        found = [
            Part(f"--- {title}attempt {one.token} ({one.outcome}), {one.log}", logs / one.log,
                  one.start, max(one.start, one.end))
            for one in ledger.log_parts(row.task_id)
        ]  # fmt: skip
        if row.state is TaskState.CLAIMED:
            for worker in (live_picture(run.folder) or {}).get("workers", ()):
                is_at_it = worker["task"].partition(" ")[0] == str(row.task_id)
                if is_at_it and (log := ledger.open_log(worker["slot"])) is not None:
                    found.append(Part(f"--- {title}running, {log[0]}", logs / log[0], log[1]))
    return found


def _is_final(run: Run, flags: _Logs) -> bool:
    """Whether nothing more will be printed, even if the run goes on one day."""
    last, stages = latest(run), _stages(run, flags)
    if flags.task is not None and not run.stored.is_gang:
        is_cut = stages[-1].path == last.path != run.folder.whole
        if is_cut and last.status().state not in _FINAL:
            return False  # the next stages have not begun
        return all(_is_over(one, task) for _, one, task in _tasks(run, flags))
    state = last.status().state
    if state == "done":  # of a map that runs stage by stage the others may be to come
        return last.path == run.folder.whole
    return state in _FINAL


def _is_over(run: Run, task: str) -> bool:
    with LedgerReader(run.folder.ledger) as ledger:
        return ledger.task(int(task)).state.is_final


def _follow(run: Run, flags: _Logs, parts: Callable[[], list[Part]], shown: Shown) -> None:
    due_s, is_told, waits = 0.0, False, ""
    while True:
        is_due, is_over = time.monotonic() >= due_s, False
        if is_due:
            due_s = time.monotonic() + max(1.0, pause_s(run))
            is_task = flags.task is not None and not run.stored.is_gang
            works = is_at_work(run)
            waits, before = watching.what_it_waits_for(run), waits
            if waits and waits != before:
                output.remark(f"--- {run.path}: {waits}")
            is_over = (is_task or not works) and _is_final(run, flags)
            if not (works or is_over or is_told):
                output.remark(f"--- {run.path} has stopped; what it prints when it goes on: below")
            is_told = not works
        for part in parts():  # after that question: what was printed before the end is there
            shown.go_on(part)
        if is_over:
            return
        time.sleep(_TURN_S)


class Shown:
    """What has been shown of each file."""

    def __init__(self, num_lines: int | None) -> None:
        self.num_lines = num_lines
        self._at: dict[Path, int] = {}
        self._inodes: dict[Path, int] = {}
        self._rests: dict[Path, tuple[Part, bytes]] = {}
        self._titles: set[str] = set()
        self.has_begun = False

    def go_on(self, part: Part) -> None:
        """Show what is new in it, in whole lines."""
        try:
            with part.path.open("rb") as file:
                self._read(part, file.fileno())
        except FileNotFoundError:
            if part.end is not None:
                self._begin(part)
        except OSError as error:
            raise SetupError(f"Cannot read {part.path}: {error.strerror}.") from None

    def _read(self, part: Part, file: int) -> None:
        now = os.fstat(file)
        at = self._at.get(part.path, -1)
        if self._inodes.setdefault(part.path, now.st_ino) != now.st_ino or now.st_size < at:
            at = -1  # another file has its name, or it was cut: from its beginning
            self._flush(part.path)
            self._inodes[part.path] = now.st_ino
        end = now.st_size if part.end is None else min(part.end, now.st_size)
        if part.end is None or at <= part.start or at < part.end:
            self._begin(part)  # else it was shown while it was printed
        if at <= part.start:
            at = part.start
            if self.num_lines is not None:
                at = _last_lines_from(file, self.num_lines, part.start, end)
        while at < end:
            data = os.pread(file, min(_BLOCK, end - at), at)
            if not data:
                break
            at += len(data)
            self._show(part, data)
        if part.end is not None and self._rests.get(part.path, (part, b""))[0].start == part.start:
            self._flush(part.path)
        self._at[part.path] = at

    def _begin(self, part: Part) -> None:
        self.has_begun = True
        if part.title and part.title not in self._titles:
            self._flush(part.path)
            self._titles.add(part.title)
            output.say(part.title)

    def _show(self, part: Part, data: bytes) -> None:
        rest = self._rests.pop(part.path, (part, b""))[1] + data
        cut = rest.rfind(b"\n") + 1
        if len(rest) - cut > _LONGEST_LINE:
            cut = len(rest)
        whole, rest = rest[:cut], rest[cut:]
        if part.prefix:
            whole = b"".join(part.prefix + line for line in whole.splitlines(keepends=True))
        output.pass_on(whole)
        if rest:
            self._rests[part.path] = part, rest

    def _flush(self, path: Path) -> None:
        """Show the line that has no end."""
        if path in self._rests:
            part, rest = self._rests.pop(path)
            output.pass_on(part.prefix + rest + b"\n")

    def end(self) -> None:
        for path in list(self._rests):
            self._flush(path)


def _last_lines_from(file: int, count: int, start: int, end: int) -> int:
    """Where the last ``count`` lines between two places begin."""
    if not count:
        return end
    at, num = end, 0
    while at > start:
        low = max(start, at - _BLOCK)
        data = os.pread(file, at - low, low)
        data = data[:-1] if at == end else data  # the end of the last line begins no other
        for place in _newlines_from_behind(data):
            num += 1
            if num == count:
                return low + place + 1
        at = low
    return start


def _newlines_from_behind(data: bytes) -> Sequence[int]:
    places, place = [], len(data)
    with suppress(ValueError):
        while True:
            place = data.rindex(b"\n", 0, place)
            places.append(place)
    return places


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


def show_why(argv: list[str]) -> int:
    flags = parse(_Why, argv, "why", _WHY)
    experiment = find_experiment(flags.run) if flags.task is None else None
    found = (
        why(find_run(flags.run), flags.task) if experiment is None else why_experiment(experiment)
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
        lines += [f"  {more}: muster errors {shell_word(found.path)}"]
    trace = _trace(found)
    if trace:
        lines += ["  where it failed:", *(f"    {line}" for line in trace)]
    if found.lines:
        shown = (f"    {shortened(line)}" for line in found.lines)
        lines += [f"  the last lines of {found.log}:", *shown]
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
