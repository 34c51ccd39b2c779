"""Why a gang ended: from how each rank ended to the culprit and at most ten lines of report. Pure.

When one rank fails, the others fail a moment later because their connections close, and some of
them are faster to say so. The culprit is the first rank whose end does not look like that.
"""

from __future__ import annotations

import dataclasses
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muster.base.codec import read_json
from muster.base.errors import MusterError
from muster.gang.stall import name_ranks

MAX_LINES = 10
_FRAME_LINES = 6
_TAIL_LINES = 4
_LINE_WIDTH = 300

_TIMED_OUT = "timed out waiting for the others"
#: What a rank says when another one has gone: what the report calls it → the pattern.
_CONSEQUENCES = {
    name: re.compile(pattern, re.I)
    for name, pattern in {
        "connection closed by peer": r"connection (was )?(likely )?closed|closed by peer",
        "connection reset by peer": r"connection reset|ConnectionResetError",
        "broken pipe": r"broken ?pipe",
        "NCCL remote error": r"nccl\s?remote ?error|ncclSystemError|NCCL.*(abort|remote)",
        "connection to the store lost": r"DistNetworkError|DistStoreError|recvValue|sendBytes"
        r"|failed to (recv|send)",
        _TIMED_OUT: r"(socket|store|wait|watchdog).{0,40}time(d )?out"
        r"|timed? ?out (waiting|after)",
        "could not connect to the others": r"connection refused|connectFullMesh"
        r"|DistBackendError.*connect",
    }.items()
}
#: What NCCL's watchdog leaves in the log of a rank that it aborts: the rank has waited in vain.
_GAVE_UP = re.compile(
    r"Watchdog caught collective operation timeout|communicator was aborted", re.I
)


@dataclass(frozen=True, kw_only=True)
class RankError:
    """The exception that ended a rank, as it wrote it down; ``frames`` are its text lines.

    ``log_start``: the byte of its log where it begins to print it; None where it has none.
    """

    type: str
    message: str
    frames: tuple[str, ...]
    time_s: float
    log_start: int | None = None

    @property
    def text(self) -> str:
        first = self.message.strip().splitlines()[0] if self.message.strip() else ""
        return f"{self.type}: {first}" if first else self.type

    @property
    def follows(self) -> str | None:
        """What it is called where it looks like that of a rank whose neighbour has gone."""
        text = f"{self.type}: {self.message}"
        found = (name for name, pattern in _CONSEQUENCES.items() if pattern.search(text))
        return next(found, None)


@dataclass(frozen=True, kw_only=True)
class RankEnd:
    """``code``: exit code, or minus the signal that killed it.

    ``was_stopped``: muster had told it to end by then. ``tail``: the last lines of its log, as many
    as an abort prints.
    """

    rank: int
    code: int
    time_s: float
    was_stopped: bool = False
    error: RankError | None = None
    tail: tuple[str, ...] = ()


def find_culprit(ends: Sequence[RankEnd]) -> RankEnd | None:
    """The rank that failed first of its own; None when none failed.

    Where ranks only gave up waiting, it is the one that they waited for, if there is but one.
    """
    failed = [end for end in ends if end.code != 0]
    late = _waited_for(failed)
    return late[0] if len(late) == 1 else min(failed, key=_guilt, default=None)


def _waited_for(failed: Sequence[RankEnd]) -> list[RankEnd]:
    """The ranks that muster had to stop, where all the others had given up waiting.

    They were at work, or waited too and had not given up yet.
    """
    late = [end for end in failed if end.was_stopped and consequence(end) == "stopped"]
    rest = [end for end in failed if end not in late]
    has_own = any(consequence(end) is None for end in rest)
    return late if any(map(_gave_up, rest)) and not has_own else []


def raised_while_stopping(ends: Sequence[RankEnd]) -> list[RankEnd]:
    """Of a gang that was asked to end: the ranks that raised an exception of their own meanwhile.

    A rank that merely ended, by the signal or because the others had gone, did what it was asked.
    """
    raised = [
        dataclasses.replace(end, was_stopped=False)
        for end in ends
        if end.error is not None and end.error.type != "KeyboardInterrupt"
    ]
    return [end for end in raised if consequence(end) is None]


def report(
    ends: Sequence[RankEnd], *, world_size: int, log: Path, num_oom_kills: int = 0
) -> tuple[str, ...]:
    """At most ten lines: the culprit with the end of its traceback, the others, the log.

    ``log`` is the culprit's; ``num_oom_kills``: processes that the kernel killed for lack of
    memory meanwhile.
    """
    culprit = find_culprit(ends)
    if culprit is None:
        return ()
    lines = [_headline(culprit, world_size, num_oom_kills)]
    late = [end.rank for end in _waited_for([end for end in ends if end.code != 0])]
    if late:
        who = name_ranks(late) if len(late) == 1 else f"one of {name_ranks(late)}"
        lines = [f"{who} of {world_size} did not come to where the others waited"]
    rest = [end for end in ends if end.rank not in late] if len(late) > 1 else ends
    after = [*_others(rest, culprit), f"log: {log}"]
    room = MAX_LINES - len(lines) - len(after)
    detail = culprit.error.frames if culprit.error else _telling(culprit.tail)
    shown = [f"  {line}" for line in detail[-min(room, _FRAME_LINES) :]]
    return tuple(line[:_LINE_WIDTH] for line in [*lines, *shown, *after])


def mark(end: RankEnd, ends: Sequence[RankEnd], world_size: int) -> str:
    """The line that belongs below the traceback in the log of a rank that ended because another
    one had failed; "" for one that did not."""
    culprit, name = find_culprit(ends), end.error and end.error.follows
    if not name or culprit is None or culprit is end or consequence(culprit) is not None:
        return ""
    return f"muster: this followed ({name}); the cause: {_headline(culprit, world_size, 0)}"


def consequence(end: RankEnd) -> str | None:
    """What this end is called when it follows from another rank's; None when it stands alone."""
    if end.error is not None and end.error.follows is not None:
        return end.error.follows
    if end.error is None and _gave_up(end):
        return _TIMED_OUT
    return "stopped" if end.was_stopped else None


def _gave_up(end: RankEnd) -> bool:
    """Whether NCCL's watchdog has aborted this rank, which had waited in vain.

    A timeout that a rank raises itself does not count: it may be of its data loader's worker, or of
    a program that it runs.
    """
    is_aborted = end.error is None and end.code == -signal.SIGABRT
    return is_aborted and any(map(_GAVE_UP.search, end.tail))


def _telling(tail: Sequence[str]) -> Sequence[str]:
    """The lines that say most: NCCL's own message, which stacks follow, or else the last lines."""
    return [line for line in tail if _GAVE_UP.search(line)][:1] or tail[-_TAIL_LINES:]


def _guilt(end: RankEnd) -> tuple[int, float, int]:
    """A sort key: a rank's own failure first, then a consequence, then one that muster stopped."""
    # Not by time first: a rank whose connection closes can be quicker to say so than the rank that
    # closed it is to write down its traceback.
    why = consequence(end)
    grade = 0 if why is None else 2 if end.was_stopped else 1
    when_s = end.error.time_s if end.error is not None else end.time_s
    return (grade, when_s, end.rank)


def _headline(end: RankEnd, world_size: int, num_oom_kills: int) -> str:
    who = f"rank {end.rank} of {world_size}"
    if end.error is not None:
        return f"{who} failed: {end.error.text}"
    if end.code > 0:
        return f"{who} failed: it ended with exit code {end.code}"
    words = f"{who} was killed by {_signal_name(-end.code)}"
    if -end.code == getattr(signal, "SIGKILL", 9):
        if num_oom_kills:
            many = f"{num_oom_kills} process{'es' if num_oom_kills > 1 else ''}"
            return f"{words}: out of memory, the kernel has killed {many} meanwhile"
        return f"{words}: by somebody else, or by the kernel for lack of memory"
    return words


def _others(ends: Sequence[RankEnd], culprit: RankEnd) -> list[str]:
    """One line for the ranks that ended because of the culprit, one for others that failed too."""
    folded: dict[str, list[int]] = {}
    alone: list[RankEnd] = []
    for end in ends:
        if end.rank == culprit.rank or (end.code == 0 and not end.was_stopped):
            continue
        why = consequence(end)
        if why is None:
            alone.append(end)
        else:
            folded.setdefault(why, []).append(end.rank)
    lines = []
    same = [end for end in alone if end.error and _text(end) == _text(culprit)]
    different = [end for end in alone if end not in same]
    if same:
        lines.append(f"{name_ranks(end.rank for end in same)} failed in the same way")
    if different:
        who = name_ranks(end.rank for end in different)
        lines.append(f"{who} failed too: {_text(different[0])}")
    if folded:
        ranks = [rank for group in folded.values() for rank in group]
        why = ", ".join(name for name in folded if name != "stopped") or "stopped"
        lines.append(f"{name_ranks(ranks)} ended because of it ({why})")
    return lines


def _text(end: RankEnd) -> str:
    if end.error is not None:
        return end.error.text
    return f"exit code {end.code}" if end.code >= 0 else _signal_name(-end.code)


def _signal_name(number: int) -> str:
    try:
        return f"{signal.Signals(number).name} ({number})"
    except ValueError:
        return f"signal {number}"


def read_rank_error(path: Path) -> RankError | None:
    """What a rank has written down about its end; None where it could not."""
    try:
        return rank_error_of(read_json(path, "error record"))
    except MusterError:
        return None


def rank_error_of(record: Mapping[str, Any] | None) -> RankError | None:
    """What such a record says; None where it is none."""
    if record is None:
        return None
    try:
        return RankError(
            type=str(record["type"]),
            message=str(record["message"]),
            frames=tuple(map(str, record["frames"])),
            time_s=float(record["time_s"]),
            log_start=start if isinstance(start := record.get("log_start"), int) else None,
        )
    except (LookupError, TypeError, ValueError, OverflowError):
        return None
