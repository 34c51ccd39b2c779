"""How what a run costs grows with its size: three sizes each, and the power that fits them.

    python benchmarks/growth.py            # up to a million functions and two million rows
    python benchmarks/growth.py --quick

The cost is the processor time of the whole command and of all that it has started, as a user pays
it, with its start; beside it stands what one task or row more costs from each size to the next,
where the start is not hidden in it, and the memory of the largest process. A power above 1.05 is
worse than linear. Listing by itself is in listing.py, and many workers are in scale.py.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent))
from measuring import growth, machine, table, write_json

TARGET = "def noop(i: int = 0, seed: int = 0):\n    return {'i': i}\n"
STAGE = "def same(record):\n    return record\n"
DEVICES = ("--devices", "cpu:2", "--quiet")
MUSTER = ("-m", "muster")


class Cost(NamedTuple):
    """Processor seconds of all processes, and the memory of the largest."""

    cpu_s: float
    memory_mib: float


class Place:
    """A folder with what is run; each cost is that of one command for a size."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "noop.py").write_text(TARGET)
        (folder / "same.py").write_text(STAGE)

    def functions(self, size: int) -> Cost:
        values = ",".join(map(str, range(1000)))
        grid = ("--grid", f"i={values}", "--seeds", str(size // 1000))
        return self._muster("sweep", "noop.py:noop", *grid, "--run-dir", f"run-{size}", *DEVICES)

    def commands(self, size: int) -> Cost:
        words = ("sweep", "--seeds", str(size), "--run-dir", f"commands-{size}", *DEVICES)
        return self._muster(*words, "--", "true", "{seed}")

    def tables(self, size: int) -> Cost:
        """Both, of the run of as many functions."""
        table = self.folder / f"run-{size}" / "results.csv"
        table.unlink()
        found = self._cost("-m", "muster.farm.table_process", f"run-{size}")
        if not table.exists():
            sys.exit(f"The process of the table has not written {table}")
        return found

    def status(self, size: int) -> Cost:
        return self._muster("status", f"run-{size}")

    def rows(self, size: int) -> Cost:
        source = self.folder / f"in-{size}.jsonl"
        text = "the quick brown fox jumps over the lazy dog " * 3
        with source.open("w") as file:
            for n in range(size):
                row = {"id": n, "text": f"{text}{n}", "score": round(n / 7, 6), "tag": f"t{n % 97}"}
                file.write(json.dumps(row) + "\n")
        words = ("map", "same.py:same", "--input", source.name, "--output", f"out-{size}.jsonl")
        found = self._muster(*words, "--run-dir", f"map-{size}", *DEVICES)
        source.unlink()
        return found

    def _muster(self, *words: str) -> Cost:
        return self._cost(*MUSTER, *words)

    def _cost(self, *words: str) -> Cost:
        process = subprocess.Popen(
            [sys.executable, *words], cwd=self.folder, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        # With what its children have used that it has waited for, which are all.
        _, code, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(code)
        if process.returncode:
            sys.exit(f"{' '.join(words)[:200]} ended with exit code {process.returncode}")
        return Cost(used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)


#: What is counted, its sizes, and those of a quick run; tables and status look at the functions.
SIZES = {
    "functions": ("tasks", (10_000, 100_000, 1_000_000), (1_000, 2_000, 4_000)),
    "the tables of a run": ("tasks", (10_000, 100_000, 1_000_000), (1_000, 2_000, 4_000)),
    "muster status": ("tasks", (10_000, 100_000, 1_000_000), (1_000, 2_000, 4_000)),
    "commands": ("tasks", (500, 2_000, 8_000), (10, 20, 40)),
    "a map": ("rows", (20_000, 200_000, 2_000_000), (500, 1_000, 2_000)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found: dict[str, dict[int, Cost]] = {}
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as name:
        place = Place(Path(name))
        measured: dict[str, Callable[[int], Cost]] = {
            "functions": place.functions, "the tables of a run": place.tables,
            "muster status": place.status, "commands": place.commands, "a map": place.rows,
        }  # fmt: skip
        for what, measure in measured.items():
            _, full, quick = SIZES[what]
            found[what] = {}
            for size in quick if args.quick else full:
                found[what][size] = measure(size)
                print(f"  {what}, {size:,}: {found[what][size]}", file=sys.stderr)
    rows = [row for what, costs in found.items() for row in rows_of(what, SIZES[what][0], costs)]
    table(["", "size", "processor, s", "one more, µs", "largest process, MiB"], rows)
    print()
    for what, costs in found.items():
        growth(
            f"processor time of {what}", SIZES[what][0], [*costs], [c.cpu_s for c in costs.values()]
        )
    write_json(args.json, {"machine": machine(), "found": found})


def rows_of(what: str, by: str, costs: dict[int, Cost]) -> list[list[str]]:
    sizes: Sequence[int] = [*costs]
    rows = []
    for size, before in zip(sizes, [None, *sizes], strict=False):
        more = "" if before is None else (
            f"{1e6 * (costs[size].cpu_s - costs[before].cpu_s) / (size - before):.1f}"
        )  # fmt: skip
        cost = costs[size]
        rows.append([what, f"{size:,} {by}", f"{cost.cpu_s:.2f}", more, f"{cost.memory_mib:.0f}"])
    return rows


if __name__ == "__main__":
    main()
