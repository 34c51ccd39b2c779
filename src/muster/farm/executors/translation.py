"""What a far worker says of its files, said of the driver's.

Its log is a part of ours. Its code lies in a folder with a name of its own on every node, so that
the same failure on two nodes would look like two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath

from muster.farm.events import Event, Results, TargetBroken, WorkerDied
from muster.farm.executors.ray_pilot import CODE, RUNS
from muster.farm.model import Finished, Outcome


@dataclass(frozen=True, kw_only=True)
class Translation:
    """``log_base``: where the far log begins in ours. ``places``: far folders and ours."""

    log_base: int
    places: Mapping[str, str]

    def of(self, event: Event) -> Event:
        match event:
            case Results(worker_id, finished):
                return Results(worker_id, [self._finished(item) for item in finished])
            case WorkerDied():
                return event._replace(
                    trace=self._text(event.trace),
                    log_start=event.log_start + self.log_base,
                    log_end=event.log_end + self.log_base,
                )
            case TargetBroken(worker_id, message, trace):
                return TargetBroken(worker_id, self._text(message), self._text(trace))
        return event

    def _finished(self, item: Finished) -> Finished:
        moved = item._replace(
            log_start=item.log_start + self.log_base, log_end=item.log_end + self.log_base
        )
        if item.outcome is Outcome.OK:
            return moved
        return moved._replace(message=self._text(item.message), trace=self._text(item.trace))

    def _text(self, text: str) -> str:
        for far, ours in self.places.items():
            text = text.replace(far, ours)
        return text


def far_places(scratch: str, run_name: str, num_roots: int) -> list[str]:
    """Where a pilot has the run folder and the roots of its code."""
    home = PurePath(scratch)
    roots = [str(home / CODE / str(number)) for number in range(num_roots)]
    return [str(home / RUNS / run_name), *roots]
