"""A tracker: ``--log-to lines``. It writes a line for each number, into the run folder."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from muster.trackers import Ended, Place, Point, Tracked


class Lines:
    most_open = 16

    def __init__(self, place: Place) -> None:
        self._folder = place.trackers / "lines"

    def open(self, tracked: Tracked) -> "LinesRun":
        self._folder.mkdir(parents=True, exist_ok=True)
        return LinesRun(self._folder / f"{tracked.id}.jsonl")


class LinesRun:
    def __init__(self, path: Path) -> None:
        self.last_steps = _last_steps(path)
        self._file = path.open("a", encoding="utf-8")

    def log(self, points: Sequence[Point]) -> None:
        for point in points:
            self._write({"name": point.name, "step": point.step, "value": point.value})

    def settle(self) -> None:
        self._file.flush()

    def finish(self, ended: Ended) -> None:
        self._write({"state": ended.state, "result": dict(ended.result)})
        self._file.close()

    def leave(self) -> None:
        self._file.close()

    def _write(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")


def _last_steps(path: Path) -> dict[str, int]:
    """What an earlier process has written: those steps are not sent again."""
    found: dict[str, int] = {}
    if path.exists():
        for text in path.read_text(encoding="utf-8").splitlines():
            try:
                line = json.loads(text)
            except ValueError:  # cut in two by a kill
                continue
            if "step" in line:
                found[line["name"]] = max(line["step"], found.get(line["name"], 0))
    return found
