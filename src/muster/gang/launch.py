"""Starts a gang and stays with it to its end: the half that needs no torch.

launcher (this module) → supervisor (``muster.supervisor``, torch's elastic agent) → ranks
(``gang.rank``). The launcher alone talks to the user: it follows the logs, hears the supervisor's
events, passes signals on, and says whose fault it was. Whatever happens, nothing it started is left
running: ranks and supervisor die with their parents, everything carries a mark by which it is found
at the end, and a reaper does that for a launcher that is killed with -9.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from muster.base import processes
from muster.base.errors import (
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_REQUEUE,
    EXIT_SETUP,
    EXIT_SOME_FAILED,
)
from muster.base.journal import EVENTS, Tail, last_lines
from muster.base.signals import WARNING, Requests, listening, stop_code, stopped_by
from muster.gang.blame import (
    RankEnd,
    find_culprit,
    raised_while_stopping,
    rank_error_of,
    read_rank_error,
    report,
)
from muster.gang.handle import SupervisorHandle, start_supervisor
from muster.gang.spec import Entry, GangSpec
from muster.run.state import last_word

_TURN_S = 0.05
#: As many lines as an aborted process prints: every thread's stack, in Python and in C.
_TAIL_LINES = 400
#: Beyond its grace, what a supervisor may take to end itself and its ranks.
_SUPERVISOR_S = 10.0


class Watcher(Protocol):
    """Whoever has a gang launched: he hears of it, and says what others want of it."""

    def hear(self, rank: int, line: str) -> None:
        """Get a line that a rank of this node has printed."""

    def say(self, line: str) -> None:
        """Get a remark about the run."""

    def is_cancelled(self) -> bool:
        """Asked at every turn; it is as good as Ctrl-C."""

    def moves(self) -> bool:
        """Asked once the ranks of a training have made a step; it is as good as USR1, but for what
        the ending says."""


@dataclass(frozen=True, kw_only=True)
class GangEnding:
    """How a gang ended. ``report``: at most ten lines, none when all is well.

    ``stopped_by``: the name of the signal that ended it, "cancel" for `muster cancel`, "" for
    none or one that came too late; ``stall``: what the watchdog said; ``is_moving``: it has saved
    only to go on on other devices; ``word``: what a rank has left behind about how it ended;
    ``ends``: how each rank of this node ended, where one failed.
    """

    exit_code: int
    report: tuple[str, ...] = ()
    restarts: int = 0
    stopped_by: str = ""
    stall: str = ""
    is_moving: bool = False
    word: Mapping[str, Any] = field(default_factory=dict)
    ends: tuple[RankEnd, ...] = ()

    def without_late_request(self) -> GangEnding:
        """The same, but for a request that came when all was done and has ended nothing."""
        is_late = self.exit_code == EXIT_OK and self.word.get("ending") == "finished"
        return dataclasses.replace(self, stopped_by="") if is_late else self


def launch_gang(handle: SupervisorHandle | None, spec: GangSpec, watcher: Watcher) -> GangEnding:
    """Run the gang to its end. The run folder must exist.

    ``handle``: a supervisor that was started early; one that does not suit ``spec`` is replaced.
    The first Ctrl-C, TERM or HUP asks the ranks to end and kills them after the grace; the second
    kills at once; USR1 goes to the ranks. The supervisor is closed at the end.
    """
    forks = spec.start == "fork"
    if handle is None or handle.forks != forks:
        if handle is not None:
            handle.close()
        handle = start_supervisor(forks=forks)
    with listening() as requests, handle, requests.watched():
        return _Launch(handle, spec, watcher, requests).run()


class _Launch:
    def __init__(
        self,
        handle: SupervisorHandle,
        spec: GangSpec,
        watcher: Watcher,
        requests: Requests,
    ) -> None:
        self._handle = handle
        self._spec = spec
        self._watcher = watcher
        self._requests = requests
        self._is_moving = self._are_told = self._is_warned = False
        self._picture = self._newest_picture()
        self._tails: dict[int, Tail] = {}
        self._world_size = spec.world_size
        self._report: tuple[str, ...] = ()
        self._ends: tuple[RankEnd, ...] = ()
        self._restarts = 0
        self._stall = ""
        self._stopped_by = 0
        self._is_cancelled = False
        self._kill_at_s: float | None = None
        self._done: dict[str, Any] = {}
        self._rest = b""
        self._news: selectors.BaseSelector | None = None
        self._checkpoint = self._newest_checkpoint()
        for local_rank in range(spec.num_ranks):
            self._follow(spec.first_rank + local_rank)

    def run(self) -> GangEnding:
        self._spec.folder.ending_json.unlink(missing_ok=True)
        for rank in self._tails:
            self._spec.folder.rank_error(rank).unlink(missing_ok=True)
        process = self._handle.process
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(self._spec.to_line())
            process.stdin.flush()
        self._news = selector = selectors.DefaultSelector()
        selector.register(process.stdout, selectors.EVENT_READ)
        is_open = True
        while is_open and not self._done:  # after that the supervisor has nothing left to do
            for _ in selector.select(_TURN_S):
                is_open = self._read_events(process.stdout.fileno())
            self._obey_signals()
            for tail in self._tails.values():
                tail.read()
            self._tell_of_checkpoint()
            self._handle.check()
            if self._kill_at_s is not None and time.monotonic() > self._kill_at_s:
                break
            # It has ended; what it said last may still be in the pipe, and says how the gang ended.
            if process.poll() is not None and not selector.select(0):
                break
        selector.close()
        self._news = None
        broken = self._why_supervisor_ended() if not self._done and not self._stopped_by else ""
        self._handle.close()
        for tail in self._tails.values():
            tail.read(is_last=True)
        self._tell_of_checkpoint()
        return self._ending(broken)

    # ------------------------------------------------------------------ listening

    def _read_events(self, descriptor: int) -> bool:
        data = os.read(descriptor, 1 << 16)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._take(json.loads(line))
        return bool(data)

    def _take(self, event: dict[str, Any]) -> None:
        EVENTS.debug("%s", event)
        match event["event"]:
            case "ranks":
                self._note_new_ranks()
                self._world_size = event["world_size"]
                for rank in event["pids"]:
                    self._follow(int(rank))
                if event["restart"] > 0:
                    self._restarts = event["restart"]
                    self._watcher.say(f"restart {self._restarts} of {self._spec.max_restarts}")
                    self._report, self._stall, self._ends = (), "", ()
            case "remark":
                self._watcher.say(event["text"])
            case "stall":
                self._stall = event["text"]
            case "failed":
                self._note_new_ranks()
                ends = [self._end_of(end) for end in event["ends"]]
                self._note_failure(ends)
                for end, told in zip(ends, event["ends"], strict=True):
                    hidden_from = end.error.log_start if end.error else None
                    self._tails[end.rank].skip_to(told["log_size"], hidden_from)
                if event["restarts_left"] > 0 and not self._stopped_by:
                    for line in self._report or self._stall_report():
                        self._watcher.say(line)
            case "done":
                self._done = event

    def _follow(self, rank: int) -> None:
        if rank not in self._tails:
            path, hear = self._spec.folder.rank_log(rank), partial(self._watcher.hear, rank)
            self._tails[rank] = Tail(path, hear, lambda: self._hidden_from(rank))

    def _note_new_ranks(self) -> None:
        """From here on the ranks of before have nothing to say."""
        self._picture, self._are_told = self._newest_picture(), False

    def _newest_picture(self) -> tuple[int, int]:
        """Which file shows where the training is; a rank writes the first after its first step."""
        with contextlib.suppress(OSError):
            found = os.stat(self._spec.folder.status_json)
            return found.st_ino, found.st_mtime_ns
        return 0, 0

    def _hidden_from(self, rank: int) -> int | None:
        """Where the traceback of a rank begins, which the report shows, and of the culprit only.

        An event that is still to be heard may be that it has failed, and its record is gone once it
        starts again: then nothing is shown before that is heard.
        """
        error = read_rank_error(self._spec.folder.rank_error(rank))
        if self._news is not None and self._news.select(0):
            return 0
        return error.log_start if error is not None else None

    def _tell_of_checkpoint(self) -> None:
        """Log a checkpoint that the ranks have written."""
        newest = self._newest_checkpoint() if EVENTS.isEnabledFor(logging.DEBUG) else ""
        if newest and newest != self._checkpoint:
            self._checkpoint = newest
            EVENTS.debug("checkpoint written: %s", newest)

    def _newest_checkpoint(self) -> str:
        steps = self._spec.folder.checkpoints.glob("step-*")
        return max((path.name for path in steps if path.name[5:].isdigit()), default="")

    # ------------------------------------------------------------------ ending

    def _obey_signals(self) -> None:
        if not self._stopped_by and self._watcher.is_cancelled():
            self._is_cancelled = True
            self._requests.note(signal.SIGINT, None)
        for number in self._requests.take():
            process = self._handle.process
            if number == getattr(signal, WARNING, None):
                self._is_moving, self._is_warned = False, True
                processes.send_signal(process.pid, number)
            elif not self._stopped_by:
                name = "muster cancel" if self._is_cancelled else signal.Signals(number).name
                self._stop(number)  # first: to say it may take long
                self._watcher.say(
                    f"{name}: the ranks are asked to end and killed after "
                    f"{self._spec.grace_s:.0f} s; again to kill them now"
                )
            else:
                self._kill_at_s = 0.0
                if number == signal.SIGINT:
                    self._stopped_by = number
        self._move()

    def _move(self) -> None:
        """Have the ranks save and end where somebody asks for other devices.

        USR1 has no deadline, so a save may take its time. It would kill ranks that set up or that
        have ended: it is sent only while there is a picture of these ranks.
        """
        if self._stopped_by or self._is_warned or self._are_told:
            return
        if self._newest_picture() in ((0, 0), self._picture):
            return
        if self._is_moving:  # a turn after the request: to answer that may have taken long
            self._are_told = True
            processes.send_signal(self._handle.process.pid, getattr(signal, WARNING, 0))
        elif self._watcher.moves():
            self._is_moving = True
            self._watcher.say("muster devices: the ranks save, and use other devices then")

    def _stop(self, number: int) -> None:
        self._is_moving, self._stopped_by = False, number
        processes.send_signal(self._handle.process.pid, signal.SIGTERM)
        self._kill_at_s = time.monotonic() + self._spec.grace_s + _SUPERVISOR_S

    def _end_of(self, told: dict[str, Any]) -> RankEnd:
        """How a rank ended, from what the supervisor tells: it may have started the next by now."""
        rank, size = told["rank"], told["log_size"]
        start, log = self._tails[rank].start, self._spec.folder.rank_log(rank)
        return RankEnd(
            rank=rank,
            code=-processes.KILL if told["code"] is None else told["code"],
            time_s=told["time_s"],
            was_stopped=told["was_stopped"],
            error=rank_error_of(told.get("error")),
            tail=last_lines(log, _TAIL_LINES, start=start, end=size),
        )

    def _note_failure(self, full: list[RankEnd]) -> None:
        if self._stopped_by:
            full = raised_while_stopping(full)
        culprit = find_culprit(full)
        if culprit is None or (self._stall and all(end.was_stopped for end in full if end.code)):
            return
        self._ends = tuple(full)
        ooms = processes.out_of_memory_kills() - self._handle.ooms_before
        self._report = report(
            full,
            world_size=self._world_size,
            log=self._spec.folder.rank_log(culprit.rank),
            num_oom_kills=ooms,
        )

    def _why_supervisor_ended(self) -> str:
        """Why the supervisor has ended without saying how it went."""
        try:
            code = self._handle.process.wait(timeout=_SUPERVISOR_S)
        except subprocess.TimeoutExpired:
            return "the supervisor process does not end"
        if code < 0:
            return f"the supervisor process was killed by signal {-code}"
        return f"the supervisor process ended with exit code {code}"

    def _ending(self, broken: str) -> GangEnding:
        report_lines, code = self._report, EXIT_OK
        folder = self._spec.folder
        word = last_word(folder)
        state = self._done.get("state", "")
        if self._stopped_by:
            code = self._code_of_stop(word.get("ending"))
        elif broken or state == "broken":
            words = broken or self._done["message"]
            log = folder.agent_log(self._spec.node_rank)
            report_lines = (f"the gang could not be run: {words}", *self._log_of_supervisor())[:9]
            report_lines, code = (*report_lines, f"log: {log}"), EXIT_SETUP
        elif state != "succeeded":
            code = EXIT_SOME_FAILED
            report_lines = report_lines or self._stall_report()
        by = stopped_by(self._stopped_by, is_cancelled=self._is_cancelled)
        if code == EXIT_OK and not self._stopped_by and word.get("ending") == "requeue":
            code, by = EXIT_REQUEUE, WARNING if self._is_warned else ""
        ending = GangEnding(
            exit_code=code,
            report=report_lines,
            restarts=self._restarts,
            stopped_by=by,
            stall=self._stall,
            is_moving=self._is_moving and code == EXIT_REQUEUE,
            word=word,
            ends=self._ends,
        )
        return ending.without_late_request()

    def _code_of_stop(self, recorded: object) -> int:
        """The exit code of a stopped gang: 75 if the same command goes on from where it stopped.

        A training does; another program only if it says so.
        """
        has_ended = self._done.get("state") == "succeeded" and recorded != "requeue"
        if recorded == "finished" or has_ended:  # before it heard of the signal
            return EXIT_OK
        can_go_on = recorded == "requeue" or isinstance(self._spec.program, Entry)
        return stop_code(self._stopped_by) if can_go_on else EXIT_INTERRUPTED

    def _stall_report(self) -> tuple[str, ...]:
        stacks = self._spec.folder.logs / "rank-*.stack"
        return (f"stalled: {self._stall}", f"stacks: {stacks}") if self._stall else ()

    def _log_of_supervisor(self) -> tuple[str, ...]:
        return tuple(
            f"  {line}" for line in last_lines(self._spec.folder.agent_log(self._spec.node_rank), 4)
        )
