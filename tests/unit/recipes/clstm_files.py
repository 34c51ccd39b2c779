"""Small files of bars for the tests of what is read."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np

HEADER = "timestamp,symbol,open,high,low,close,volume"
MONDAY = datetime(2024, 1, 1)


def written(folder: Path, lines: Sequence[str], name: str = "bars.csv") -> Path:
    path = folder / name
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def days(first: datetime, number: int, *, weekends: bool) -> list[datetime]:
    found: list[datetime] = []
    day = first
    while len(found) < number:
        if weekends or day.weekday() < 5:
            found.append(day)
        day += timedelta(days=1)
    return found


def file_of(folder: Path, number: int, symbols: str = "AB", volume: int = 1_000_000) -> Path:
    stream = np.random.default_rng(1)
    lines = [HEADER]
    for symbol in symbols:
        close = 50.0 * np.exp(np.cumsum(stream.normal(0.0, 0.01, number)))
        for day, price in zip(days(MONDAY, number, weekends=False), close, strict=True):
            lines.append(
                f"{day:%Y-%m-%d},{symbol},{price},{price * 1.01},{price * 0.99},{price},{volume}"
            )
    return written(folder, lines)
