"""What a search asks of a rule of early stopping."""

from __future__ import annotations

from abc import ABC, abstractmethod

from muster.search.records import Decision
from muster.search.trials import Report, Trial


class Rule(ABC):
    """It names the steps at which it wants to hear a trial, and decides there."""

    #: Whether a trial rests at each mark until it is promoted.
    pauses = False

    @abstractmethod
    def mark(self, trial: Trial, index: int) -> float | None:
        """The step of the trial's mark number ``index``; None where there is none."""

    @abstractmethod
    def decide(self, trial: Trial, report: Report) -> list[Decision]:
        """What follows from a trial's arrival at its next mark, for it and for others."""

    def begun(self, trial: Trial) -> None:  # noqa: B027 - most rules need not know
        """There is this new trial."""

    def rested(self, trial: Trial) -> list[Decision]:
        """What follows from the end of a trial that was paused: its checkpoint is as it will be."""
        return []

    def finished(self, trial: Trial) -> list[Decision]:
        """What follows from a trial's end by itself."""
        return []

    def left(self, trial: Trial) -> list[Decision]:
        """What follows from a trial's failure."""
        return []


class NoRule(Rule):
    """Every trial runs to its end."""

    def mark(self, trial: Trial, index: int) -> float | None:
        return None

    def decide(self, trial: Trial, report: Report) -> list[Decision]:
        return []
