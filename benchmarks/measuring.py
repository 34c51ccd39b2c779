"""What the benchmarks share: repeats that alternate, medians with their spread, goals, records."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

# Some test machines set it, and every command would then compile all its modules at each start:
# nearly half a second that no installed package costs.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

ROOT = Path(__file__).parents[1]
#: Costs that grow with a power above this are worse than linear: a defect. The twentieth is for
#: figures that scatter and for memory that no longer fits into caches.
LINEAR = 1.05
#: The exit code of a benchmark that has nothing to measure here.
SKIPPED = 77
#: The range of fewer holds the median less often than in 95 of 100 cases.
_LEAST_OF_INTERVAL = 6
_BEGAN_S = time.monotonic()


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


def at_most(values: Sequence[float], limit: float) -> bool | None:
    """Whether the median of ``values``, such as differences of neighbours, is at most ``limit``.
    None where their 95 % interval has the limit in it, or they are too few to have one: chance
    would decide.
    """
    if len(values) < _LEAST_OF_INTERVAL:
        return None
    low, high = interval(values)
    if low <= limit < high:
        return None
    return high <= limit


def told(values: Sequence[float], digits: int = 2) -> str:
    """The median with its sign and its 95 % interval, or a dash where there is nothing."""
    if not values:
        return "-"
    found = (statistics.median(values), *interval(values))
    return "{:+.{d}f} [{:+.{d}f}, {:+.{d}f}]".format(*found, d=digits)


def processor_s(pid: int) -> float:
    """The processor time that a process and its threads, also those that have ended, have used:
    to the nanosecond, where /proc counts in hundredths. Raises OSError once it is gone.
    """
    return time.clock_gettime(
        ~pid << 3 | 2
    )  # CPUCLOCK_SCHED of Linux, as clock_getcpuclockid has it


def exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """The slope of a straight line through the logarithms: 1 is linear."""
    xs, ys = [math.log(x) for x in sizes], [math.log(y) for y in costs]
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    covered = sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True))
    return covered / sum((a - x) ** 2 for a in xs)


_goals: list[dict[str, Any]] = []


def skip(why: str) -> NoReturn:
    """End, because what is measured is not on this machine; no record is written."""
    print(f"{why}: not measured", file=sys.stderr)
    sys.exit(SKIPPED)


def installed(names: Sequence[str], packages: Mapping[str, str]) -> list[str]:
    """Those of ``names`` whose package is there; who has none is always there."""
    there = []
    for name in names:
        package = packages.get(name)
        if package is None or importlib.util.find_spec(package):
            there.append(name)
        else:
            print(f"{package} is not installed: {name} is not measured", file=sys.stderr)
    return there


def is_quick() -> bool:
    """Whether this run is too short for its figures to mean anything."""
    return "--quick" in sys.argv[1:]


def goal(
    what: str, wanted: str, measured: str, is_held: bool | None, *,
    bound: str = "", at_any_size: bool = False, shown: bool = True,
) -> str:  # fmt: skip
    """Whether a goal is held, as a word; `write_json` keeps it. A quick run judges only what holds
    ``at_any_size``, such as that nothing is lost.

    is_held: None where that cannot be told from what was measured (`at_most`)
    bound: the best that can be had here, and what shows that, where it is known
    shown: print it as well
    """
    can_judge = is_held is not None and (at_any_size or not is_quick())
    verdict = bool(is_held) if can_judge else None  # NumPy's truth would be written as a text
    word = {True: "held", False: "NOT held", None: "not judged"}[verdict]
    _goals.append(
        {"what": what, "wanted": wanted, "measured": measured, "is_held": verdict, "bound": bound}
    )
    if shown:
        print(f"goal, {what}, {wanted}: {word} ({measured}){bound and f'; bound: {bound}'}")
    return word


def growth(what: str, by: str, sizes: Sequence[float], costs: Sequence[float]) -> float:
    """The power by which ``costs`` grow with ``sizes``, and the goal that it is no worse than
    linear.
    """
    power = exponent(sizes, costs)
    measured = f"{power:.2f} ({min(sizes):,} to {max(sizes):,})"
    goal(f"{what}, by {by}", f"power ≤ {LINEAR}", measured, power <= LINEAR)
    return power


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


def commit() -> str:
    """The last commit of what is measured and of the benchmarks, without their results; with a
    hash where files differ from it. Empty where there is no git.
    """
    where = ["--", "src", "benchmarks", ":!benchmarks/results"]
    try:
        last, changed = (
            subprocess.run(
                ["git", "-C", str(ROOT), *words, *where], capture_output=True, check=True
            ).stdout
            for words in (["log", "-1", "--format=%h"], ["diff", "HEAD"])
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    mark = f"+{hashlib.sha256(changed).hexdigest()[:8]}" if changed else ""
    return last.decode().strip() + mark


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
    """The record, with the command and the tables that were printed: the pages of figures are made
    from it. It is there as a whole or not at all.
    """
    if path is None:
        return
    words = sys.argv[1:]
    if "--json" in words:
        del words[words.index("--json") : words.index("--json") + 2]
    words = [word for word in words if word[:7] != "--json="]
    command = f"python benchmarks/{Path(sys.argv[0]).name} {shlex.join(words)}".rstrip()
    whole = {
        "command": command, "words": words, "is_quick": is_quick(), "commit": commit(),
        "took_s": round(time.monotonic() - _BEGAN_S), "machine": machine(), "tables": _tables,
        "goals": _goals, **record,
    }  # fmt: skip
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_text(json.dumps(whole, indent=2, default=str) + "\n")
    temporary.replace(path)
