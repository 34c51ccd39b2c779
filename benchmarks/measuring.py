"""What the benchmarks share: repeats that alternate, medians with their spread, machine facts."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# Some test machines set it, and every command would then compile all its modules at each start:
# nearly half a second that no installed package costs.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


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


def exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """The slope of a straight line through the logarithms: 1 is linear."""
    xs, ys = [math.log(x) for x in sizes], [math.log(y) for y in costs]
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    covered = sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True))
    return covered / sum((a - x) ** 2 for a in xs)


_goals: list[dict[str, Any]] = []


def goal(what: str, wanted: str, measured: str, is_held: bool, *, shown: bool = True) -> str:
    """Whether a goal is held, as a word; ``shown``: print it as well. `write_json` keeps it."""
    word = "held" if is_held else "NOT held"
    _goals.append({"what": what, "wanted": wanted, "measured": measured, "is_held": is_held})
    if shown:
        print(f"goal, {what}, {wanted}: {word} ({measured})")
    return word


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


_tables: list[dict[str, Any]] = []


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "") -> None:
    """Print it, and keep it for `write_json`."""
    _tables.append({"caption": caption, "headers": [*headers], "rows": [[*row] for row in rows]})
    if caption:
        print(f"\n{caption}")
    widths = [max(len(row[i]) for row in [headers, *rows]) for i in range(len(headers))]
    for row in [headers, *rows]:
        print("  ".join(text.ljust(w) for text, w in zip(row, widths, strict=True)).rstrip())


def write_json(path: Path | None, record: dict[str, Any]) -> None:
    """The record, with the command and the tables that were printed: docs/measurements.md is made
    from it."""
    if path is None:
        return
    words = [Path(sys.argv[0]).name, *sys.argv[1:]]
    if "--json" in words:
        del words[words.index("--json") : words.index("--json") + 2]
    command = "python benchmarks/" + shlex.join(word for word in words if word[:7] != "--json=")
    whole = {"command": command, "machine": machine(), "tables": _tables,
             "goals": _goals, **record}  # fmt: skip
    path.write_text(json.dumps(whole, indent=2, default=str) + "\n")
