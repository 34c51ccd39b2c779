"""What a run tells of its tasks, for tests that look at many in the same way."""

from __future__ import annotations

import json
from collections import Counter

import muster


def states(run: muster.Run) -> Counter[str]:
    """How many of its tasks are in which state."""
    return Counter(row["state"] for row in run.results().to_pylist())


def told(run: muster.Run, kind: str) -> list[str]:
    """The texts of its events of one kind, such as ``quarantined``."""
    events = [json.loads(line) for line in run.folder.events.read_text().splitlines()]
    return [event["text"] for event in events if event["event"] == kind]
