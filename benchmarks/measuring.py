"""What the benchmarks share: repeats that alternate, medians with their spread, machine facts."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def alternate(contenders: dict[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Run all contenders in turn, ``repeats`` rounds; what drifts hits all of them alike."""
    figures: dict[str, list[float]] = {name: [] for name in contenders}
    for round_number in range(repeats):
        for name, run in contenders.items():
            figures[name].append(run())
            print(f"  round {round_number + 1}: {name}: {figures[name][-1]:,.1f}", file=sys.stderr)
    return figures


def summary(values: Sequence[float]) -> dict[str, float]:
    return {
        "median": statistics.median(values),
        "low": min(values),
        "high": max(values),
        "repeats": len(values),
    }


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The median's 95 % interval from the order statistics (the sign test turned round)."""
    ordered, n = sorted(values), len(values)
    below = max(0, int(n / 2 - 0.98 * n**0.5) - 1)
    return ordered[below], ordered[n - 1 - below]


def held(is_so: bool) -> str:
    return "held" if is_so else "NOT held"


def machine(*packages: str) -> dict[str, Any]:
    """Processor, cores, kernel, date and versions: what a figure means nothing without."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [x for x in cpuinfo.read_text().splitlines() if x.startswith("model name")]
        model = names[0].partition(":")[2].strip() if names else model
    versions = {"python": platform.python_version()}
    for package in ("muster-gpu", "torch", "numpy", *packages):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "processor": model,
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "versions": versions,
    }


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[i]) for row in [headers, *rows]) for i in range(len(headers))]
    for row in [headers, *rows]:
        print("  ".join(text.ljust(w) for text, w in zip(row, widths, strict=True)).rstrip())


def write_json(path: Path | None, record: Any) -> None:
    if path is not None:
        path.write_text(json.dumps(record, indent=2, default=str) + "\n")
