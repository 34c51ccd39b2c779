"""trackio: its database on this machine, which ``trackio show`` opens.

It is written as trackio's own server does, without starting one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from muster.api.trackers.tracker import (
    PRINTABLE,
    PROJECT,
    Ended,
    Place,
    Point,
    Tracked,
    as_utf8,
    from_tracker,
    rows_of,
    to_tracker,
)

#: Columns of trackio's own.
_TAKEN = frozenset({"step", "timestamp", "time", "project", "run", "run_id", "run_name", "metrics"})


class Trackio:
    most_open = 1000

    def __init__(self, place: Place) -> None:
        from trackio.sqlite_storage import SQLiteStorage

        self._storage = SQLiteStorage

    def open(self, tracked: Tracked) -> TrackioRun:
        return TrackioRun(self._storage, tracked)


class TrackioRun:
    def __init__(self, storage: Any, tracked: Tracked) -> None:
        self._storage = storage
        self._id = tracked.id
        self._name = as_utf8(f"{tracked.group}/{tracked.name}" if tracked.folder else tracked.name)
        tags = {f"muster/{name}": value for name, value in tracked.tags.items()}
        named = {_name(name): _value(value) for name, value in tracked.settings.items()}
        self._config = {**named, **tags, "muster/group": as_utf8(tracked.group)}
        storage.init_db(PROJECT)
        self.last_steps: dict[str, int] = {}
        for row in storage.get_logs(PROJECT, self._name, run_id=self._id):
            for name in row.keys() - {"step", "timestamp"}:
                known = from_tracker(name)
                self.last_steps[known] = max(row["step"], self.last_steps.get(known, row["step"]))

    def log(self, points: Sequence[Point]) -> None:
        found = [
            (step, time_s, {_name(name): value for name, value in values.items()})
            for step, time_s, values in rows_of(points)
        ]
        ids = [f"{step}:{time_s!r}:{_names(row)}" for step, time_s, row in found]
        self._write(found, ids, "running")

    def settle(self) -> None:
        return  # `log` has committed it

    def finish(self, ended: Ended) -> None:
        result = {f"result/{_name(name)}": _value(value) for name, value in ended.result.items()}
        self._config |= {} if ended.state == "stopped" else result
        numbers = {k: v for k, v in result.items() if type(v) in (int, float) and math.isfinite(v)}
        step = max(self.last_steps.values(), default=0)
        row = (step, ended.time_s, numbers)
        self._write([row], [f"{step}:{_names(numbers)}"], ended.state)

    def leave(self) -> None:
        return

    def _write(
        self, found: Sequence[tuple[int, float, dict[str, Any]]], ids: Sequence[str], state: str
    ) -> None:
        """In one transaction; a row whose id is there is not written again."""
        self._storage.bulk_log(
            PROJECT, self._name, [row for _, _, row in found],
            steps=[step for step, _, _ in found],
            timestamps=[datetime.fromtimestamp(when, UTC).isoformat() for _, when, _ in found],
            log_ids=[f"{self._id}:{rest}" for rest in ids],
            config={**self._config, "muster/state": state}, run_id=self._id,
        )  # fmt: skip


def _names(row: Mapping[str, Any]) -> str:
    return ",".join(sorted(row))


def _name(name: str) -> str:
    return to_tracker(name, PRINTABLE, taken=_TAKEN)


def _value(value: Any) -> Any:
    return value if isinstance(value, bool | int | float) else as_utf8(value)
