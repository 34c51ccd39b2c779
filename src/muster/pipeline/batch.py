"""Running a batch of rows, or a row that waits, through stages, and choosing the batch's size.

It uses no files and no clock. A row may become several records or none, which are kept together. A
stage that raises is called again for halves, so that only the record at fault is rejected.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from operator import contains
from typing import Any, NamedTuple

from muster.base.device_faults import looks_like_out_of_memory, names_of
from muster.pipeline.sources.source import ArrowRow
from muster.pipeline.stages import EngineError, Reject

_TRACE_LIMIT = 8000
#: What a stage may raise for a record. One that calls sys.exit is as wrong as one that raises.
_FAULTS = (Exception, SystemExit)
_ID = "id"


class OutOfMemory(Exception):
    """The device's memory did not hold the batch; the text is that of the first error.

    ``__cause__`` is not set: the frames of the error would keep the tensors of the failed call.
    """


@dataclass(frozen=True)
class Failure:
    """Why a record is not in the output. ``record``: what the stages made, if it was whole."""

    stage: str
    reason: str
    trace: str = ""
    record: dict[str, Any] | None = None


@dataclass(slots=True)
class Row:
    """A row of the input and what has become of it so far: records, failures, both or nothing.

    ``source``: the record as it was read, where its values have types of their own.
    """

    number: int
    id: Any
    records: list[dict[str, Any]] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    source: ArrowRow | None = None


class Usual(NamedTuple):
    """Rows that follow each other from ``first`` on, of which each has one record and nothing else
    to tell: most batches are such, and take no object for each of their rows. ``ids`` are those of
    the rows, as a `Row` has them.
    """

    first: int
    ids: Sequence[Any]
    records: list[dict[str, Any]]

    def rows(self) -> list[Row]:
        """The same as objects, for what becomes of them otherwise."""
        numbered = enumerate(zip(self.ids, self.records, strict=True), self.first)
        return [Row(number, own, [record]) for number, (own, record) in numbered]


@dataclass(frozen=True)
class Step:
    """A stage as the worker runs it. ``one``: a function of a record; ``many``: of a batch.

    ``retries``: how often a single record is tried again after the stage raised for it.
    """

    name: str
    one: Callable[[dict[str, Any]], Any] | None = None
    many: Callable[[list[dict[str, Any]]], Sequence[Any]] | None = None
    retries: int = 0


def apply(step: Step, rows: Sequence[Row], *, keeps_ids: bool) -> None:
    """Replace the records of each row by what ``step`` makes of them.

    Raises OutOfMemory where the step does; the rows are then as they were.
    """
    made = outcomes(step, [record for row in rows for record in row.records])
    settle(rows, made, keeps_ids=keeps_ids)


def outcomes(step: Step, records: Sequence[dict[str, Any]]) -> list[Any]:
    """What ``step`` makes of each record: what a stage may return, or a failure.

    Raises OutOfMemory where the step does.
    """
    if step.one is None:
        return _call_many(step, records)
    return _call_each(step, step.one, records)


def settle(rows: Sequence[Row], made: Sequence[Any], *, keeps_ids: bool) -> None:
    """Replace the records of each row by their `outcomes`."""
    left = iter(made)
    for row in rows:
        kept: list[dict[str, Any]] = []
        for record in row.records:
            outcome = next(left)
            if isinstance(outcome, Failure):
                row.failures.append(outcome)
            else:
                kept += children(record, outcome, keeps_ids=keeps_ids)
        row.records = kept


def are_usual(records: Sequence[Any], *, keeps_ids: bool) -> bool:
    """Whether each is a record of its own kind, and has an id if it is to have one."""
    return set(map(type, records)) == {dict} and (
        not keeps_ids or all(map(contains, records, repeat(_ID)))
    )


def _call_each(
    step: Step, function: Callable[[dict[str, Any]], Any], records: Sequence[dict[str, Any]]
) -> list[Any]:
    made: list[Any] = []
    add = made.append  # looked up once: this loop is what muster costs beside a quick stage
    while len(made) < len(records):
        try:
            for record in records[len(made) :] if made else records:
                add(function(record.copy()))
            break
        except _FAULTS as error:
            failure = failure_of(step.name, error)
        # After the handler, and with it the frames of the failed call: they may hold much memory.
        add(_again(step, function, records[len(made)], failure))
    if set(map(type, made)) <= {dict}:  # by far the most
        return made
    return [checked(step.name, one) for one in made]


def _again(
    step: Step, function: Callable[[dict[str, Any]], Any], record: dict[str, Any], failure: Failure
) -> Any:
    """Try the record again; returns the result, or the last failure.

    A record that the stage itself has rejected, which has no trace, is never tried again.
    """
    for _ in range(step.retries):
        if not failure.trace:
            break
        try:
            return function(record.copy())
        except _FAULTS as error:
            failure = failure_of(step.name, error)
    return failure


def _call_many(step: Step, records: Sequence[dict[str, Any]]) -> list[Any]:
    """Process the records; when that raises, bisect until the record at fault is alone."""
    if not records:
        return []
    assert step.many is not None
    # An error's frames hold what the call has put on the device. So the handler takes what is to
    # be known of it, and whatever needs that memory comes after the handler.
    try:
        made = step.many([dict(record) for record in records])
    except _FAULTS as error:
        failure = failure_of(step.name, error)
        has_room = not looks_like_out_of_memory(names_of(error), failure.reason)
    else:
        if not isinstance(made, list | tuple) or len(made) != len(records):
            # Nobody knows which entry belongs to which record; trying one by one would hide that.
            return [Failure(step.name, _wrong_length(step, made, len(records)))] * len(records)
        return [checked(step.name, item) for item in made]
    if not has_room:
        raise OutOfMemory(failure.reason)
    if len(records) == 1:
        return [_again(step, lambda record: _alone(step, record), records[0], failure)]
    half = len(records) // 2
    return _call_many(step, records[:half]) + _call_many(step, records[half:])


def _alone(step: Step, record: dict[str, Any]) -> Any:
    assert step.many is not None
    made = step.many([record])
    if not isinstance(made, list | tuple) or len(made) != 1:
        raise TypeError(_wrong_length(step, made, 1))
    return checked(step.name, made[0])


def _wrong_length(step: Step, made: Any, expected: int) -> str:
    records = "1 record" if expected == 1 else f"{expected} records"
    if isinstance(made, list | tuple):
        return (
            f"process of {step.name} got {records} and returned {len(made)}: return one entry per "
            "record, None to drop it, a list to put several in its place"
        )
    return f"process of {step.name} got {records} and must return a list, not {type(made).__name__}"


def checked(stage: str, made: Any) -> Any:
    """``made`` if it is a valid result of a stage, else a failure that says what is valid."""
    if made is None or isinstance(made, dict | Failure):
        return made
    if isinstance(made, Reject):
        return Failure(stage, str(made))
    if isinstance(made, list | tuple) and all(isinstance(item, dict) for item in made):
        return list(made)
    return Failure(
        stage,
        f"the stage returned {type(made).__name__}: a record (dict), None or a list of records "
        "is needed",
    )


def children(
    parent: dict[str, Any], made: dict[str, Any] | list[dict[str, Any]] | None, *, keeps_ids: bool
) -> list[dict[str, Any]]:
    """The records that were made of ``parent``, with ids derived from its id."""
    if made is None:
        return []
    if isinstance(made, dict):
        return [made if not keeps_ids or _ID in made else {_ID: parent.get(_ID), **made}]
    if not keeps_ids:
        return made
    own = parent.get(_ID)
    return [
        child if child.get(_ID, own) != own else {**child, _ID: f"{own}.{number}"}
        for number, child in enumerate(made)
    ]


async def wait_for(
    stages: Sequence[tuple[str, Any]], row: Row, *, keeps_ids: bool, retries: int
) -> None:
    """Replace the records of ``row`` by what stages with ``process_one`` make of them, in turn.

    Raises EngineError, which is no record's fault.
    """
    for name, stage in stages:
        kept: list[dict[str, Any]] = []
        for record in row.records:
            made = await _asked(name, stage, record, retries)
            if isinstance(made, Failure):
                row.failures.append(made)
            else:
                kept += children(record, made, keeps_ids=keeps_ids)
        row.records = kept


async def _asked(name: str, stage: Any, record: dict[str, Any], retries: int) -> Any:
    """The stage's result for the record, or its failure after all tries."""
    for left in range(retries, -1, -1):
        try:
            return checked(name, await stage.process_one(record.copy()))
        except EngineError:
            raise
        except _FAULTS as error:
            if isinstance(error, Reject) or not left:
                return failure_of(name, error)
    raise AssertionError("the last try returns")


def failure_of(stage: str, error: BaseException) -> Failure:
    if isinstance(error, Reject):
        return Failure(stage, str(error))
    try:
        text = str(error)
    except Exception as inner:  # the user's own exception class
        text = f"<its text cannot be had: {type(inner).__name__}>"
    reason = f"{type(error).__name__}: {text}" if text else type(error).__name__
    trace = "".join(traceback.format_exception(error))[-_TRACE_LIMIT:]
    return Failure(stage, reason[:2000], trace)


class Pace:
    """How many rows a cheap function takes at once: a batch lasts about a tenth of a second.

    So a kill, a time limit or sharing loses little work, and the journal gets few entries.
    """

    def __init__(self, most: int) -> None:
        self.now = min(8, most)
        self._most = most

    def took(self, seconds: float) -> None:
        if seconds < 0.05:
            self.now = min(self._most, self.now * 2)
        elif seconds > 0.2:
            self.now = max(1, self.now // 2)


class BatchSize:
    """How many rows go in together: halved by an out-of-memory, doubled again by good batches.

    It never exceeds the first size. A size is tried again after 8 good batches, or after twice as
    many for each time it has failed, up to 1024: one huge record does not slow down all others.
    """

    def __init__(self, start: int) -> None:
        self.now = start
        self._start = start
        self._failures: Counter[int] = Counter()
        self._good = 0

    def shrink(self, failed: int) -> int:
        """A batch of ``failed`` records did not fit; the new size."""
        self._failures[self._above(max(1, min(self.now, failed) // 2))] += 1
        self.now = max(1, min(self.now, failed) // 2)
        self._good = 0
        return self.now

    def good(self) -> None:
        if self.now == self._start:
            return
        self._good += 1
        larger = self._above(self.now)
        if self._good >= min(1024, 8 << self._failures[larger]):
            self.now = larger
            self._good = 0

    def _above(self, size: int) -> int:
        return min(self._start, size * 2)
