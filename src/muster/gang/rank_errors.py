"""What ranks write down about their own ends, read back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from muster.base.errors import MusterError
from muster.base.records import read_json
from muster.gang.blame import RankError


def read_rank_error(path: Path) -> RankError | None:
    """What a rank has written down about its end; None where it could not."""
    try:
        record: Mapping[str, Any] = read_json(path, "error record")
    except MusterError:
        return None
    return RankError(
        type=record["type"],
        message=record["message"],
        frames=tuple(record["frames"]),
        time_s=record["time_s"],
    )
