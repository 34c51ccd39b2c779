"""How far a training is, from what its rank 0 has written; without a ledger and without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from muster.base.code import Code
from muster.base.codec import read_json
from muster.base.errors import MusterError
from muster.gang.tail import last_lines
from muster.run.folder import RunFolder


def training_state(folder: RunFolder, *, is_running: bool) -> Mapping[str, Any] | None:
    """The last picture of a training that runs, else its results, else its last recorded step.

    None for a folder in which nothing was trained.
    """
    picture = _record(folder.status_json)
    if is_running and picture:
        return picture
    if results := _record(folder.training_results):
        return results
    for line in reversed(last_lines(folder.metrics, 50)):
        with suppress(ValueError, RecursionError):
            record = json.loads(line)
            if isinstance(record, dict) and record.get("kind") in ("train", "update"):
                # Of how many: a picture that a kill has left, or what was said at the stop.
                known = {**_record(folder.ending_json), **picture}
                return {"total_steps": known.get("total_steps"), **record}
    return None


def _record(path: Path) -> dict[str, Any]:
    with suppress(MusterError):
        found = read_json(path, "state of a training")
        if isinstance(found, dict):
            return found
    return {}


def code_of_work(folder: RunFolder) -> Code:
    """The code that the newest checkpoint was made by; empty where none says so."""
    paths = folder.checkpoints.glob("step-*/extra.json")
    by_length = sorted(paths, key=lambda path: (len(path.parent.name), path.parent.name))
    for path in reversed(by_length):
        code = _record(path).get("code")
        if isinstance(code, dict):
            return code
    return {}
