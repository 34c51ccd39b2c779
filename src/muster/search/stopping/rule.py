"""What a search asks of a rule of early stopping."""

from __future__ import annotations

from typing import Protocol

from muster.search.records import Decision
from muster.search.trials import Report, Trial


class Rule(Protocol):
    """It names the steps at which it wants to hear a trial, and decides there."""

    @property
    def pauses(self) -> bool:
        """Whether a trial rests at each mark until it is promoted."""
        ...

    def begun(self, trial: Trial) -> None:
        """There is this new trial."""
        ...

    def mark(self, trial: Trial, index: int) -> float | None:
        """The step of the trial's mark number ``index``; None where there is none."""
        ...

    def decide(self, trial: Trial, report: Report) -> list[Decision]:
        """What follows from a trial's arrival at its next mark, for it and for others."""
        ...

    def finished(self, trial: Trial) -> list[Decision]:
        """What follows from a trial's end by itself."""
        ...

    def left(self, trial: Trial) -> list[Decision]:
        """What follows from a trial's failure."""
        ...


class NoRule:
    """Every trial runs to its end."""

    pauses = False

    def begun(self, trial: Trial) -> None: ...

    def mark(self, trial: Trial, index: int) -> float | None:
        return None

    def decide(self, trial: Trial, report: Report) -> list[Decision]:
        return []

    def finished(self, trial: Trial) -> list[Decision]:
        return []

    def left(self, trial: Trial) -> list[Decision]:
        return []
