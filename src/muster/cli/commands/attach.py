"""``muster attach``, ``muster wait`` and ``muster cancel``: a run that another process works on,
until it ends or is told to.
"""

from __future__ import annotations

import math
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Annotated

from muster.api.experiments.experiment import ExperimentFolder
from muster.api.experiments.watching import (
    End,
    QueuedRun,
    Waited,
    as_now,
    end_if_over,
    end_of,
    folders_of,
    is_at_work,
    latest,
    open_waited,
    open_watched,
    pause_s,
    says_more,
    what_it_waits_for,
    why_unknown,
    working_process,
)
from muster.api.look.listing import array_of, job_of, stopped_sentence, word_of
from muster.api.runs import Run
from muster.api.start.queued_starts import process_to_end
from muster.base.clock import human_duration
from muster.base.errors import EXIT_INTERRUPTED, EXIT_OK, SetupError, UsageError
from muster.base.flags import Flag, parse_duration
from muster.base.processes import send_signal
from muster.base.shown_text import shell_word
from muster.base.signals import Interrupted, handled
from muster.cli import output
from muster.cli.flags import JsonFlags, LookFlags
from muster.cli.gang import GangShownFlags, RankLogs, TrainScreen, gang_audience
from muster.cli.parse import RunPlace, parse
from muster.farm.view import view_of
from muster.run.session import is_held
from muster.run.state import last_report, live_picture

_TURN_S = 0.2
#: How long a command may take that prints, and draws the figures of, a run that is over.
_LAST_WORDS_S = 10.0


@dataclass(frozen=True, kw_only=True)
class _Attach(RunPlace):
    """Which run, and what of it."""

    all_ranks: bool = False
    """Show what every rank prints, not only rank 0."""


_ATTACH = """Show the live screen of a run that another process works on, until it ends.

Ctrl-C or q leaves the run going, with exit code 130 or 0; otherwise the exit code is that of the
run's command. In a pipe or a file there are lines in place of the screen.

Examples:
  muster attach train-1a2b3c
  muster attach digits-20260131-090500 --all-ranks
"""


def main(argv: list[str]) -> int:
    flags = parse(_Attach, argv, "attach", _ATTACH)
    run = open_watched(flags.run)
    quoted = shell_word(run.path)
    if run.folder.elements_json.exists():
        raise UsageError(
            f"{run.path} is an array: each of its elements is a run of its own.",
            hint=f"muster attach {quoted}/elements/N, or muster status {quoted} --watch",
        )
    if (end := end_if_over(run)) is not None:
        output.say(f"{end.sentence} (nobody works on it now)")
        return end.exit_code
    if why := why_unknown(run):
        raise SetupError(why, hint=f"{run.path} can be looked at with: muster status {quoted}")
    try:
        with handled(("SIGTERM", "SIGHUP"), _end):
            has_left = _watch(run, all_ranks=flags.all_ranks)
    except KeyboardInterrupt:
        output.remark(f"{run.folder.whole} goes on.")
        return EXIT_INTERRUPTED
    if has_left:
        output.remark(f"{run.folder.whole} goes on.")
        return EXIT_OK
    for line in last_report(run.folder):
        output.remark(line)
    end = end_of(run)
    output.say(end.sentence)
    return end.exit_code


def _end(number: int, _: object) -> None:
    raise Interrupted(number)


def _watch(run: Run, *, all_ranks: bool) -> bool:
    """Show it until it ends; whether somebody has pressed q before that."""
    ask_due_s, waits = 0.0, ""
    with ExitStack() as stack:
        key = stack.enter_context(_keys())
        show = stack.enter_context(_screen(run, all_ranks=all_ranks))
        while True:
            works = True
            if time.monotonic() >= ask_due_s:
                ask_due_s = time.monotonic() + pause_s(run)
                works = is_at_work(run)
                waits, before = what_it_waits_for(run), waits
                if waits and waits != before:
                    output.remark(waits)
            show(not works)
            if not works:
                return False
            if key(_TURN_S) in (b"q", b"Q"):
                return True


@contextmanager
def _screen(run: Run, *, all_ranks: bool) -> Iterator[Callable[[bool], None]]:
    """What shows the run as it is now; it is told whether that is the last time."""
    stored, shown = run.stored, GangShownFlags(all_ranks=all_ranks)
    if stored.is_program:
        hear = gang_audience((), all_ranks=all_ranks, level="info").hear
        yield RankLogs(run.folder, hear).read
    elif stored.is_gang:
        with TrainScreen(run.folder, shown, ()) as screen:
            yield RankLogs(run.folder, screen.audience.hear).read
    else:
        is_live = output.is_terminal() and sys.stderr.isatty()
        with output.LiveScreen() if is_live else output.PlainScreen(output.say) as farm:

            def show(is_last: bool) -> None:
                held = [folder for folder in folders_of(run) if is_held(folder)]
                picture = live_picture(held[-1]) if held else None
                view = None if picture is None else view_of(picture)
                if view is not None:
                    farm.show(view)

            yield show


@contextmanager
def _keys() -> Iterator[Callable[[float], bytes]]:
    """What waits so long for a key, of a terminal that is ours: then it gets the keys one by one.

    A job in the background would be stopped for touching its terminal.
    """

    def wait(seconds: float) -> bytes:
        time.sleep(seconds)
        return b""

    try:
        import termios
        import tty

        is_ours = sys.stdin.isatty() and os.tcgetpgrp(0) == os.getpgrp()
        before = termios.tcgetattr(0) if is_ours else None
    except (ImportError, OSError, ValueError):  # Windows; or a stdin that is closed
        before = None
    if before is None:
        yield wait
        return

    def key(seconds: float) -> bytes:
        ready, _, _ = select.select([0], [], [], seconds)
        return os.read(0, 1) if ready else b""

    tty.setcbreak(0)
    try:
        yield key
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)


#: As that of `timeout` of coreutils.
EXIT_TIME_OVER = 124


@dataclass(frozen=True, kw_only=True)
class _Wait(JsonFlags):
    """Which runs, and for how long."""

    runs: Annotated[tuple[str, ...], Flag(is_positional=True, metavar="RUN…")]
    """The runs' folders, or their names below ./runs."""
    any: bool = False
    """Return when the first of them has ended, with its exit code."""
    timeout_s: Annotated[
        float | None, Flag(name="timeout", metavar="TIME", read=parse_duration)
    ] = None
    """Return after this time in any case, with exit code 124."""


_WAIT = """Wait until runs have ended, and return the exit code of their commands.

Of several runs it is that of the first, in the order in which they are named, that is not 0. A run
that was killed counts as failed, with exit code 1; what is over already is not waited for. One that
waits in the queue for GPUs is waited for from there; it counts with 75 if it leaves the queue
without having begun.

Examples:
  muster wait train-1a2b3c && muster export train-1a2b3c --to results.csv
  muster wait digits-1 digits-2 --any --timeout 8h
"""


def wait(argv: list[str]) -> int:
    flags = parse(_Wait, argv, "wait", _WAIT)
    runs = {text: open_waited(text) for text in flags.runs}
    try:
        ends = _ends(runs, flags)
    except KeyboardInterrupt:
        output.remark("Stopped waiting; the runs go on.")
        return EXIT_INTERRUPTED
    codes = [ends[text].exit_code for text in runs if text in ends]
    if len(ends) < len(runs) and not (flags.any and ends):
        assert flags.timeout_s is not None
        rest = ", ".join(str(run.path) for text, run in runs.items() if text not in ends)
        output.complain(f"{rest}: not over after {human_duration(flags.timeout_s)}.")
        codes = [EXIT_TIME_OVER]
    if flags.json:
        output.say_json([_plain(run, ends.get(text)) for text, run in runs.items()])
    return next((code for code in codes if code), EXIT_OK)


def _ends(runs: dict[str, Waited], flags: _Wait) -> dict[str, End]:
    """How those of ``runs`` have ended that have when it is time to return. Runs that begin
    meanwhile are opened in ``runs``."""
    due_s = math.inf if flags.timeout_s is None else time.monotonic() + flags.timeout_s
    ends: dict[str, End] = {}
    told, workers = set[str](), dict[str, int]()
    while True:
        runs |= {text: as_now(run) for text, run in runs.items()}
        for text, run in runs.items():
            if text in ends:
                continue
            if (pid := working_process(run)) is not None:
                workers[text] = pid
            if (end := end_if_over(run)) is not None:
                if text in workers:
                    _hear_out(run, workers[text], due_s)
                ends[text] = end
                if not flags.json:
                    output.say(end.sentence)
        if len(ends) == len(runs) or (flags.any and ends):
            return ends
        # Else one would wait for ever, and not know for what. Also where the time is over: a SLURM
        # that does not answer may have taken all of it.
        for text, run in runs.items():
            is_new = text not in ends and text not in told
            if is_new and (why := why_unknown(run) or what_it_waits_for(run)):
                output.remark(why)
                told.add(text)
        if (left_s := due_s - time.monotonic()) <= 0:
            return ends
        time.sleep(min(left_s, max(map(pause_s, runs.values()))))


def _hear_out(run: Waited, pid: int, due_s: float) -> None:
    """Whoever waits reads next what the command prints and draws of a run that is over."""
    until_s = min(due_s, time.monotonic() + _LAST_WORDS_S)
    while time.monotonic() < until_s and says_more(run, pid):
        time.sleep(_TURN_S / 4)


def _plain(run: Waited, end: End | None) -> dict[str, object]:
    path = run.folder.whole if isinstance(run, Run) else run.path
    known = {} if end is None else {"exit_code": end.exit_code, "sentence": end.sentence}
    return {"run": path.name, "path": str(path), "is_over": end is not None, **known}


@dataclass(frozen=True, kw_only=True)
class _Cancel(LookFlags):
    """Which run, and which of its tasks."""

    task: Annotated[tuple[str, ...], Flag(metavar="N")] = ()
    """Cancel only these tasks of a sweep or a search, each named by its number or the start of its
    key; the others go on. One that runs is told to end, and killed if it does not."""


_CANCEL = """Cancel what has not ended; what is finished is kept.

A start that waits in the queue for GPUs leaves it, with exit code 75.

Examples:
  muster cancel runs/train-1a2b3c
  muster cancel runs/train-1a2b3c --task 12 40
"""


def cancel(argv: list[str]) -> int:
    flags = parse(_Cancel, argv, "cancel", _CANCEL)
    found = open_waited(flags.run)
    if isinstance(found, ExperimentFolder):
        from muster.cli import experiment_look

        found = experiment_look.at_work(found)
    if isinstance(found, QueuedRun):
        if not flags.task and (start := process_to_end(found.path)) is not None:
            return _cancel_first_start(found.path.name, start, flags)
        found = open_watched(str(found.path))  # which says what it is, unless it has begun now
    run = latest(found)
    if flags.task:
        return _cancel_tasks(run, flags)
    is_gang, job = run.stored.is_gang, job_of(run)
    start, works = process_to_end(run.folder.whole), is_held(run.folder)
    asked = run.cancel()
    array = array_of(run, asks_slurm=True)
    if flags.json:
        record = {"run": run.folder.name, "asked_coordinator": bool(asked)}
        output.say_json({**record, "changed": asked is not None})
    elif asked is None:
        state = word_of(run.status(), array)
        how = "has failed" if state == "failed" else f"is {state}"
        output.say(f"{run.folder.name}: nothing to cancel here, it {how}")
    elif array is not None:
        output.say(f"{run.folder.name}: asked the elements at work to cancel what has not ended")
    elif asked and job is not None and job[1].waits:
        output.say(f"{run.folder.name}: cancelled SLURM job {job[0]}, which waited in the queue")
    elif asked and start is not None and not works:
        output.say(f"{run.folder.name}: told its next start to end, {_waited(start)}")
    elif asked and is_gang:
        output.say(f"{run.folder.name}: asked its ranks to save what they can and to end")
    elif asked:
        output.say(f"{run.folder.name}: asked its coordinator to cancel what has not ended")
    else:
        output.say(f"{run.folder.name}: cancelled what had not ended")
    if array is not None and array.num_queued and not flags.json:
        output.say("  elements that wait in SLURM's queue are not reached: end them with scancel")
    if start is not None and (works or not asked) and not flags.json:
        output.say(f"  its next start is told to end, too, {_waited(start)}")
    return 0


def _cancel_first_start(name: str, start: int, flags: _Cancel) -> int:
    """Nothing of it is on disk: it leaves the queue, as it does when it is interrupted."""
    how = _waited(start)  # before it has ended
    send_signal(start, signal.SIGTERM)
    if flags.json:
        output.say_json({"run": name, "asked_coordinator": True, "changed": True})
    else:
        output.say(f"{name}: told its first start to end, {how}")
    return 0


def _waited(start: int) -> str:
    stopped = stopped_sentence(start)
    return f"which waited for GPUs in process {start}{stopped and f'; {stopped}'}"


_OF_CANCELLED = {
    "cancelled": "cancelled",
    "told": "told to end; it is cancelled as soon as it has ended",
    "together": "goes on: it runs in one call with others, and cannot be ended without them",
}


def _cancel_tasks(run: Run, flags: _Cancel) -> int:
    words = run.cancel_tasks(flags.task)
    if flags.json:
        changed = any(word in ("cancelled", "told") for word in words.values())
        output.say_json({"run": run.folder.name, "changed": changed, "tasks": words})
        return 0
    for number, word in words.items():
        already = f"nothing to cancel, it is {word.removeprefix('was ')} already"
        output.say(f"{run.folder.name}: task {number}: {_OF_CANCELLED.get(word, already)}")
    if any(word in ("cancelled", "told") for word in words.values()):
        output.say(f"  run them after all: muster retry {shell_word(run.path)} --cancelled")
    return 0
