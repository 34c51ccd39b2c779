"""Who holds a gang up: heartbeats of all ranks in, a verdict out. Pure; the clock is a parameter.

A rank is *silent* when its heartbeat is older than the limit. Where its node sees that it uses the
processor meanwhile, it computes something that holds its interpreter, such as a large json.loads: a
remark after the limit, ended after ten times it. Otherwise it is stopped: ended at once.

The gang *stands* when no rank has changed its step, phase or place for the limit. Of a gang that
stands, the ranks that do not wait for others are to blame:

=====================  =======================  ================================================
others wait            the rest                 verdict
=====================  =======================  ================================================
some                   is idle                  ended after the limit
some                   computes                 a remark after the limit, ended after ten times it
some                   sets up or saves         a remark, never ended: a disk may be slow
some                   compiles                 a remark, never ended
some                   waits for its own GPU    a remark after the limit, ended after ten times it
all wait               all idle                 mismatched collectives: ended after the limit
all wait               some compute             a remark, ended after ten times the limit
nobody waits           (any)                    a remark, never ended
=====================  =======================  ================================================

On GPUs the host runs ahead of its device and then waits for it, at full processor load. With NCCL
that is where ranks wait for each other: a rank in such a call waits, unless it knows that the work
of its own GPU is what is unfinished (``own_done``). In muster's own loops it works on its own, in
an evaluation or a rollout, unless it knows that its GPU waits. It is not known how long a GPU may
compute, so a rank on its GPU counts as one that computes, and one alone there is never ended.
After ten times the limit ranks are ended only where one is known to wait for others: in a
collective, in backward, or by ``own_done``.

Before every rank has initialised torch.distributed only silence is judged: nobody can wait yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from muster.base.shown_text import number_ranges

#: Below this share of one core over the window, a process does nothing.
_IDLE_SHARE = 0.01
#: A silent rank above this share of one core over the last seconds computes.
_BUSY_SHARE = 0.05
_BUSY_WINDOW_S = 10.0
_PATIENCE = 10.0
#: If the watchdog itself did not run for this long, no rank is judged by that time.
_GAP_S = 5.0
#: Of a gang that stands, a rank with no heartbeat for this long is silent.
_QUIET_S = 4.0

#: One rank works on its own here, for as long as its disk or its task takes.
_PATIENT = ("checkpoint", "compiling", "setup", "finish")
#: Phases of muster's own loops in which a rank may wait for its GPU and for nobody else.
_ALONE = ("data", "forward", "optimizer", "evaluation", "ending")

#: What a rank spends its time with, by its phase; all else is "the rest".
_ACTIVITIES = {
    "data": "waiting for data",
    "data loader": "waiting for data",
    "checkpoint": "checkpoints",
    **{word: word for word in ("forward", "backward", "optimizer", "evaluation", "compiling")},
}

_SINGULAR = {"are": "is", "have": "has", "wait": "waits"}

_PLACES = {
    "data": "in the data loader",
    "data loader": "in the data loader",
    "forward": "in the forward pass",
    "backward": "in backward",
    "optimizer": "in the optimizer",
    "checkpoint": "saving a checkpoint",
    "compiling": "compiling",
    "evaluation": "in the evaluation",
    "setup": "setting up",
    "finish": "summing up",
    "ending": "ending after an error",
    "": "in an unknown place",
}


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """Where one rank is: ``count`` grows with every heartbeat; ``step`` is -1 if it is not known.

    ``phase``: one of the words above or a place in the code; ``collective``: the one it is in,
    "" for none; ``num_collectives``: issued so far; ``cpu_s``: of the process and its descendants;
    ``is_ready``: torch.distributed is initialised; ``has_ended``: it left in order.
    ``on_gpu``: it is in a call that returns when its GPU is done; ``own_done``: that GPU has done
    its own work and waits for the others', None where that is not known.
    """

    rank: int
    count: int
    step: int = -1
    phase: str = ""
    collective: str = ""
    num_collectives: int = 0
    cpu_s: float = 0.0
    is_ready: bool = False
    has_ended: bool = False
    on_gpu: bool = False
    own_done: bool | None = None

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Heartbeat:
        return cls(**record)

    @property
    def activity(self) -> str:
        """
        >>> Heartbeat(rank=1, count=7, phase="forward", collective="all-reduce").activity
        'communication'
        >>> Heartbeat(rank=1, count=7, phase="mine.py:12 in step").activity
        'the rest'
        """
        return "communication" if self.collective else _ACTIVITIES.get(self.phase, "the rest")

    @property
    def waits(self) -> bool:
        """Whether it waits: in a collective, in backward (where DDP and FSDP have theirs), or for
        a GPU that waits itself.
        """
        may_wait = self.on_gpu and self.phase not in (*_PATIENT, *_ALONE)
        return self.surely_waits or (may_wait and self.own_done is not False)

    @property
    def surely_waits(self) -> bool:
        """Whether the rank is known to wait for other ranks."""
        if self.collective:
            return True
        if self.phase == "backward":
            return self.own_done is not False
        return self.on_gpu and self.own_done is True and self.phase not in _PATIENT

    @property
    def sign(self) -> tuple[int, str, str, int]:
        """What changes when the rank moves on."""
        return (self.step, self.phase, self.collective, self.num_collectives)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """``text`` says which rank is where. The gang is ended if ``is_final``, else it is a remark."""

    culprits: tuple[int, ...]
    text: str
    is_final: bool = True


@dataclass
class _Rank:
    last: Heartbeat
    heard_s: float
    moved_s: float
    cpu: list[tuple[float, float]] = field(default_factory=list)  # as its heartbeats say
    seen_cpu: list[tuple[float, float]] = field(default_factory=list)  # as its node sees it


class StallDetector:
    """Collects heartbeats and judges; all times are seconds of one monotonic clock."""

    def __init__(self, world_size: int, limit_s: float) -> None:
        self._world_size = world_size
        self._limit_s = limit_s
        self._ranks: dict[int, _Rank] = {}
        self._judged_s: float | None = None
        self._remarked: set[tuple[int, ...]] = set()

    def hear(self, heartbeat: Heartbeat, now_s: float) -> None:
        """Take in a heartbeat; one with an old ``count`` is no sign of life."""
        rank = self._ranks.get(heartbeat.rank)
        if rank is None:
            self._ranks[heartbeat.rank] = _Rank(heartbeat, now_s, now_s, [(now_s, heartbeat.cpu_s)])
            return
        if heartbeat.count <= rank.last.count:
            return
        if heartbeat.sign != rank.last.sign:
            rank.moved_s = now_s
            self._remarked.clear()
        rank.last, rank.heard_s = heartbeat, now_s
        rank.cpu.append((now_s, heartbeat.cpu_s))
        while len(rank.cpu) > 2 and rank.cpu[1][0] <= now_s - self._limit_s:
            rank.cpu.pop(0)

    def see_cpu(self, number: int, cpu_s: float, now_s: float) -> None:
        """Take in what a rank's node has seen of its processor time."""
        rank = self._ranks.get(number)
        if rank is None:
            return
        seen, window_s = rank.seen_cpu, min(_BUSY_WINDOW_S, self._limit_s)
        seen.append((now_s, cpu_s))
        while len(seen) > 2 and seen[1][0] <= now_s - window_s:
            seen.pop(0)

    def forget(self, rank: int) -> None:
        """Judge this rank no more: it has ended, so its silence means nothing."""
        if rank in self._ranks:
            old = self._ranks[rank]
            old.last = Heartbeat(rank=rank, count=old.last.count, has_ended=True)

    def judge(self, now_s: float) -> Verdict | None:
        """Return a verdict if there is one to give now; a remark is made once per standstill."""
        gap_s = 0.0 if self._judged_s is None else now_s - self._judged_s
        self._judged_s = now_s
        if gap_s > _GAP_S:
            for rank in self._ranks.values():
                rank.heard_s, rank.moved_s, rank.cpu, rank.seen_cpu = now_s, now_s, [], []
            return None
        here = [r for _, r in sorted(self._ranks.items()) if not r.last.has_ended]
        silent = [r for r in here if now_s - r.heard_s > self._limit_s]
        if silent:
            return self._silence(silent, here, now_s)
        if not here or len(self._ranks) < self._world_size:
            return None
        if not all(r.last.is_ready for r in here):
            return None
        still_s = now_s - max(r.moved_s for r in here)
        if still_s < self._limit_s:
            return None
        # They all stand because of one that was silent first, and has been for a little less.
        quiet = [r for r in here if now_s - r.heard_s > min(_QUIET_S, self._limit_s)]
        if quiet and len(quiet) < len(here):
            return self._silence(quiet, here, now_s)
        return self._standstill(here, still_s)

    def _silence(
        self, silent: Sequence[_Rank], here: Sequence[_Rank], now_s: float
    ) -> Verdict | None:
        late_s = _PATIENCE * self._limit_s
        stopped = [r for r in silent if not _computes(r) or now_s - r.heard_s > late_s]
        guilty = stopped or silent
        who = tuple(r.last.rank for r in guilty)
        oldest_s = now_s - min(r.heard_s for r in guilty)
        why = "stopped, or something holds the interpreter"
        if all(map(_computes, guilty)):
            why = "something holds the interpreter and computes"
        text = (
            f"{name_ranks(who)} {_be(who)} silent for {oldest_s:.0f} s ({why}), "
            f"last seen {_where([r.last for r in guilty])}"
        )
        text = "; ".join([text, *_describe([r.last for r in here if r not in guilty])])
        if stopped:
            return Verdict(culprits=who, text=text)
        return self._remark(who, f"{text} (busy, so left alone for now)")

    def _standstill(self, here: Sequence[_Rank], still_s: float) -> Verdict | None:
        is_alone = self._world_size == 1 and here[0].last.on_gpu
        waiting = [r for r in here if r.last.waits and not is_alone]
        others = [r for r in here if not r.last.waits]
        # In ``.item()`` a rank may wait for its own GPU alone, for as long as an evaluation takes.
        is_mutual = any(r.last.surely_waits for r in waiting)
        is_late = is_mutual and still_s >= _PATIENCE * self._limit_s
        if not waiting:
            who = tuple(r.last.rank for r in here)
            said = "; ".join(_describe([r.last for r in here]))
            return self._remark(who, f"no rank has moved for {still_s:.0f} s: {said}")
        if not others:
            said = "; ".join(_describe([r.last for r in here], count_them=True))
            text = f"all ranks wait for each other (mismatched collectives?): {said}"
            who = tuple(r.last.rank for r in here)
            if is_late or all(self._is_idle(r) for r in here):
                return Verdict(culprits=who, text=text)
            if not any(r.last.collective for r in here):  # a long backward looks the same
                text = f"no rank has moved for {still_s:.0f} s: {said}"
            return self._remark(who, f"{text} (busy, so left alone for now)")
        idle = [r for r in others if self._is_idle(r) and r.last.phase not in _PATIENT]
        guilty = idle or others
        is_late = is_late and all(r.last.phase not in _PATIENT for r in guilty)
        who = tuple(r.last.rank for r in guilty)
        rest = [r.last for r in here if r not in guilty]
        text = "; ".join([*_describe([r.last for r in guilty]), *_describe(rest)])
        if idle or is_late:
            return Verdict(culprits=who, text=text)
        return self._remark(who, f"{text} (busy, so left alone for now)")

    def _is_idle(self, rank: _Rank) -> bool:
        if len(rank.cpu) < 2 or rank.last.on_gpu or rank.last.own_done is False:
            return False
        (begin_s, begin_cpu), (end_s, end_cpu) = rank.cpu[0], rank.cpu[-1]
        return end_cpu - begin_cpu < _IDLE_SHARE * (end_s - begin_s)

    def _remark(self, who: tuple[int, ...], text: str) -> Verdict | None:
        if who in self._remarked:
            return None
        self._remarked.add(who)
        return Verdict(culprits=who, text=text, is_final=False)


def _computes(rank: _Rank) -> bool:
    if len(rank.seen_cpu) < 2:
        return False
    (begin_s, begin_cpu), (end_s, end_cpu) = rank.seen_cpu[0], rank.seen_cpu[-1]
    return end_cpu - begin_cpu > _BUSY_SHARE * (end_s - begin_s)


def name_ranks(ranks: Iterable[int]) -> str:
    """``rank 3``, ``ranks 0-2, 5``.

    >>> name_ranks([2, 0, 1, 5]), name_ranks([3]), name_ranks([0, 1])
    ('ranks 0-2, 5', 'rank 3', 'ranks 0-1')
    """
    found = set(ranks)
    return f"rank{'s' if len(found) > 1 else ''} {', '.join(number_ranges(found))}"


def _describe(heartbeats: Sequence[Heartbeat], *, count_them: bool = False) -> list[str]:
    """A clause for each group of ranks that are in the same place, the lowest rank first."""
    groups: dict[tuple[str, int], list[int]] = {}
    for heartbeat in heartbeats:
        number = heartbeat.num_collectives if count_them else -1
        groups.setdefault((_clause(heartbeat), number), []).append(heartbeat.rank)
    return [
        f"{name_ranks(ranks)} {clause if len(ranks) > 1 else _singular(clause)}"
        + (f" (collective number {number})" if number > 0 else "")
        for (clause, number), ranks in groups.items()
    ]


def _clause(heartbeat: Heartbeat) -> str:
    if heartbeat.own_done is False and not heartbeat.collective:
        return f"have a GPU that is not done with its own work, {_where([heartbeat])}"
    if heartbeat.on_gpu and not heartbeat.collective:
        return f"wait for the GPU {_where([heartbeat])}"
    if heartbeat.waits:
        return f"wait in {heartbeat.collective or heartbeat.phase}"
    return f"are {_where([heartbeat])}"


def _singular(clause: str) -> str:
    verb, _, rest = clause.partition(" ")
    return f"{_SINGULAR[verb]} {rest}"


def _where(heartbeats: Sequence[Heartbeat]) -> str:
    places = []
    for heartbeat in heartbeats:
        collective = heartbeat.collective
        place = f"in {collective}" if collective else _PLACES.get(heartbeat.phase)
        place = place or f"at {heartbeat.phase}"
        step = f" at step {heartbeat.step}" if heartbeat.step >= 0 else ""
        places.append(f"{place}{step}")
    return " and ".join(dict.fromkeys(places))


def _be(ranks: Sequence[int]) -> str:
    return "has been" if len(ranks) == 1 else "have been"
