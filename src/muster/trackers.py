"""What a tracker of one's own for ``--log-to`` needs; see docs/extensions.md.

class MyTracker:
    most_open = 8
    def __init__(self, place: Place) -> None: ...
    def open(self, tracked: Tracked) -> TrackerRun: ...
"""

from __future__ import annotations

from muster.api.trackers.tracker import (
    Ended,
    Place,
    Point,
    Tracked,
    Tracker,
    TrackerRun,
    from_tracker,
    rows_of,
    to_tracker,
)

__all__ = [
    "Ended",
    "Place",
    "Point",
    "Tracked",
    "Tracker",
    "TrackerRun",
    "from_tracker",
    "rows_of",
    "to_tracker",
]
