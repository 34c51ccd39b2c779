"""What ranks write down about their own ends, read back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from muster.base.codec import read_json
from muster.base.errors import MusterError
from muster.gang.blame import RankError


def read_rank_error(path: Path) -> RankError | None:
    """What a rank has written down about its end; None where it could not."""
    try:
        record: Mapping[str, Any] = read_json(path, "error record")
        return RankError(
            type=str(record["type"]),
            message=str(record["message"]),
            frames=tuple(map(str, record["frames"])),
            time_s=float(record["time_s"]),
        )
    except (MusterError, LookupError, TypeError, ValueError, OverflowError):
        return None
