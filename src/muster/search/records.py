"""What a search and its caller tell each other; all of it is kept in the ledger."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Proposal:
    """A task to run: setting ``params`` of trial ``trial`` with one of its seeds.

    ``seed`` is None where the search has no seeds. ``by`` says where the setting comes from: a
    sampler's name, ``try`` for a first guess, ``given`` for a task that was there before the
    search, ``pbt`` for one that begins with what trial ``parent`` had saved at ``step``.
    ``limit``: how many trials the search was to choose in all when it asked for this, None for any
    number; with it a replay decides the same, whatever the budget is by then.
    """

    trial: int
    seed: int | None
    params: Mapping[str, Any]
    by: str = "random"
    limit: int | None = None
    parent: int | None = None
    step: float | None = None


@dataclass(frozen=True)
class Point:
    """One logged number: metric ``name`` was ``value`` at ``step``."""

    name: str
    step: float
    value: float


EndState = Literal["done", "failed", "cancelled", "stopped", "paused"]


@dataclass(frozen=True)
class Ending:
    """How a task ended. ``done`` has its result's numbers in ``values``; ``stopped`` and
    ``paused``, which the search asked for, may have none, and then the last points count."""

    state: EndState
    values: Mapping[str, float] = field(default_factory=dict)


DecisionKind = Literal["stop", "pause", "promote", "replace"]


@dataclass(frozen=True)
class Decision:
    """What is to be done with the tasks of ``trial``: with that of ``seed``, or with all (None).

    ========  ==============================================================================
    stop      end it for good; its last metrics are its result
    pause     end it at its next checkpoint; it may be promoted later
    promote   it goes on: a paused task is opened again, one that still runs is left alone
    replace   it has ended for good; trial ``heir`` begins in its place, with the checkpoint of
              ``parent`` and the setting ``params``
    ========  ==============================================================================

    ``rung`` is the step at which it was decided; ``evidence`` holds the numbers that decided.
    """

    kind: DecisionKind
    trial: int
    seed: int | None = None
    rung: float | None = None
    evidence: Mapping[str, Any] = field(default_factory=dict)
    parent: int | None = None
    params: Mapping[str, Any] | None = None
    heir: int | None = None


@dataclass(frozen=True)
class Heard:
    """Record of a report: these points came from this task."""

    trial: int
    seed: int | None
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Ended:
    """Record of a report: this task has ended."""

    trial: int
    seed: int | None
    ending: Ending


Record = Proposal | Heard | Ended | Decision


@dataclass(frozen=True, kw_only=True)
class Spent:
    """What a run has used so far, as its caller measured it."""

    seconds: float = 0.0
    gpu_hours: float = 0.0
    cost: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Standing:
    """A trial as it stands: the means of its objectives over its seeds."""

    trial: int
    params: Mapping[str, Any]
    values: tuple[float, ...]
    spread: tuple[float | None, ...]
    """The standard deviation over the seeds of each objective, None for one seed."""
    seeds: int
    """How many seeds the means are of."""
    step: float | None
    """The last step it logged, None where it logged none."""
    state: Literal["done", "stopped", "paused", "running"]


def is_better(value: float, other: float, maximize: bool) -> bool:
    """Whether ``value`` beats ``other``; a NaN beats nothing, and everything beats it."""
    if math.isnan(value) or math.isnan(other):
        return math.isnan(other) and not math.isnan(value)
    return value > other if maximize else value < other
