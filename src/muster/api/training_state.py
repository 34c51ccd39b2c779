"""How far a training is, from what its rank 0 has written; without a ledger and without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from muster.base.errors import MusterError
from muster.base.records import read_json
from muster.base.run_folder import RunFolder
from muster.gang.tail import last_lines


def training_state(folder: RunFolder, *, is_running: bool) -> Mapping[str, Any] | None:
    """The last picture of a training that runs, else its results, else its last recorded step.

    None for a folder in which nothing was trained.
    """
    candidates = [folder.status_json] if is_running else []
    for path in [*candidates, folder.training_results]:
        with suppress(MusterError):
            found: Mapping[str, Any] = read_json(path, "state of a training")
            return found
    lines = last_lines(folder.metrics, 50)
    for line in reversed(lines):
        with suppress(ValueError):
            record: dict[str, Any] = json.loads(line)
            if record.get("kind") in ("train", "update"):
                return record
    return None
