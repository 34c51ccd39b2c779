"""What a search knows of its trials: a few numbers for each task, never the whole curve."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from muster.search.records import Ending, EndState, Point

TrialState = Literal["running", "waiting", "stopped", "done", "failed"]


@dataclass(frozen=True)
class Report:
    """What a trial had shown at a mark: means over its seeds."""

    step: float
    """The mark: a rung, or a step at which a rule asks."""
    value: float
    """The objective at the first step that was not before the mark."""
    best: float
    """The best objective up to there."""
    mean: float
    """The running average of the objective up to there."""


class TaskTrace:
    """One task of a trial: its last numbers, and its reports at the marks it has reached."""

    __slots__ = (
        "best", "count", "held", "is_beyond", "last", "reports", "result", "state", "step", "total"
    )  # fmt: skip

    def __init__(self) -> None:
        self.state: EndState | Literal["running"] = "running"
        self.step: float | None = None
        self.last: dict[str, float] = {}
        self.result: Mapping[str, float] = {}
        self.reports: list[Report] = []
        self.best = math.nan
        self.total = 0.0
        self.count = 0
        self.held = False
        self.is_beyond = False  # it logged beyond the last step

    def take(self, point: Point, maximize: bool) -> None:
        """Count a point of the objective; its step is later than those before."""
        self.step = point.step
        self.last[point.name] = point.value
        self.count += 1
        self.total += point.value
        if not math.isnan(point.value):
            choose = max if maximize else min
            self.best = point.value if math.isnan(self.best) else choose(self.best, point.value)

    def report(self, mark: float, name: str) -> Report:
        return Report(mark, self.last[name], self.best, self.total / self.count)

    def value_of(self, name: str) -> float:
        """What it returned under this name, otherwise what it logged last, otherwise NaN."""
        found = self.result.get(name, self.last.get(name))
        return math.nan if found is None else float(found)

    def go_on(self) -> None:
        """It was promoted."""
        self.held = False
        if self.state == "paused":
            self.state = "running"

    def end(self, ending: Ending, goal: str) -> None:
        self.state = ending.state
        self.result = dict(ending.values)
        if ending.state == "done" and not self.reports:
            # It ended before the first mark, where the other seeds of its trial would wait for it.
            value = self.value_of(goal)
            self.reports.append(Report(self.step or 0.0, value, value, value))


@dataclass
class Trial:
    """One setting and its tasks, by seed."""

    number: int
    params: Mapping[str, Any]
    by: str
    tasks: dict[int | None, TaskTrace]
    limit: int | None = None
    """How many trials there were to be when it began; None: any number."""
    parent: int | None = None
    """The trial from whose checkpoint it began; None: from nothing."""
    start: float | None = None
    """The step of that checkpoint."""
    state: TrialState = "running"
    marks: int = 0
    """How many marks have been decided."""
    reports: list[Report] = field(default_factory=list)
    """Its means at those marks."""

    def has_arrived(self) -> bool:
        """Whether every task has a number for the next mark; one that is done keeps its last."""
        return all(
            len(task.reports) > self.marks or (task.state == "done" and task.reports)
            for task in self.tasks.values()
        ) and any(len(task.reports) > self.marks for task in self.tasks.values())

    def is_over(self) -> bool:
        """Whether every task is done or came beyond the last step."""
        return all(task.state == "done" or task.is_beyond for task in self.tasks.values())

    def report_at(self, mark: int) -> Report:
        found = [task.reports[min(mark, len(task.reports) - 1)] for task in self.tasks.values()]
        return Report(
            max(report.step for report in found),
            _mean([report.value for report in found]),
            _mean([report.best for report in found]),
            _mean([report.mean for report in found]),
        )

    def value_of(self, name: str) -> float:
        """The mean over the seeds; NaN where a seed has no number."""
        return _mean([task.value_of(name) for task in self.tasks.values()])

    def spread_of(self, name: str) -> float | None:
        values = [task.value_of(name) for task in self.tasks.values()]
        return statistics.stdev(values) if len(values) > 1 else None

    @property
    def step(self) -> float | None:
        steps = [task.step for task in self.tasks.values() if task.step is not None]
        return min(steps) if steps else None


def _mean(values: list[float]) -> float:
    return values[0] if len(values) == 1 else math.fsum(values) / len(values)
