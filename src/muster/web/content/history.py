"""What the devices of a run did lately, from the end of its monitor's logs."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import numpy as np

from muster.base.errors import MusterError
from muster.monitor.files import last_rows
from muster.monitor.sample import Row
from muster.run.folder import RunFolder
from muster.web.content.decimate import decimate
from muster.web.content.plain import line, share

#: Of each node's log; about 10,000 samples of a device.
_MOST_BYTES = 2**20
_MOST_DEVICES, _PX = 256, 300


def devices(folder: RunFolder) -> list[dict[str, Any]]:
    """A row per device, with its last sample and how busy it was, from 0 to 1."""
    found: dict[tuple[str, str], list[Row]] = {}
    for log in folder.monitor_logs():
        try:
            for row in last_rows(log, _MOST_BYTES):
                found.setdefault((row.host, row.device), []).append(row)
        except MusterError:
            continue
    has_hosts = len({host for host, _ in found}) > 1
    return [
        _device(f"{host} {device}" if has_hosts else device, rows)
        for (host, device), rows in sorted(found.items())[:_MOST_DEVICES]
    ]


def _device(label: str, rows: list[Row]) -> dict[str, Any]:
    last = rows[-1]
    known = [
        (at, share(row.utilisation_percent)) for row in rows if (at := _seconds(row)) is not None
    ]
    x, y = (
        np.array([np.nan if value is None else value for value in column], float)
        for column in (zip(*known, strict=True) if known else ((), ()))
    )
    drawn = decimate(x, y, _PX)
    return {
        "label": line(label),
        "name": last.name and line(last.name),
        "busy": share(last.utilisation_percent),
        "memory_mib": last.memory_used_mib,
        "total_mib": last.memory_total_mib,
        "power_w": last.power_w,
        "temperature": last.temperature_c,
        "lost": last.lost and line(last.lost),
        "history": [list(point) for point in zip(drawn.x, drawn.y, strict=True)],
    }


def _seconds(row: Row) -> float | None:
    try:
        return datetime.fromisoformat(row.time_utc).timestamp()
    except (ValueError, TypeError, OverflowError):
        return None
