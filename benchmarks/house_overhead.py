"""What Muster itself costs, this checkout beside another one, in alternating pairs.

    python benchmarks/house_overhead.py --ref ef43f7d      # 9 pairs: about 10 minutes
    python benchmarks/house_overhead.py --other ../before  # a checkout that is there already
    python benchmarks/house_overhead.py --quick            # this checkout beside HEAD

Both are run by the same interpreter with the same packages; only where muster is imported from
differs, and a child says that it is so. Every pair measures both, and the next pair in the opposite
order. A ratio is that of one pair, so what drifts hits both sides of it alike: above 1 this
checkout is slower. ``cpu`` is the processor time of the command and of all that it has started.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent))
from measuring import machine, summary, table, write_json

ROOT = Path(__file__).parents[1]
TARGET = "def noop(i: int = 0, seed: int = 0):\n    return {'i': i}\n"
#: The first steps warm up: caches, threads, the data.
WARM_STEPS = 10


class Cost(NamedTuple):
    seconds: float
    cpu_s: float


class Checkout:
    """``muster`` as the sources in ``root`` have it."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root = root.absolute()
        self._folder = folder
        folder.mkdir()
        (folder / "noop.py").write_text(TARGET)
        # One thread: two of a small model wait for each other, by the luck of the scheduler.
        self._env = {**os.environ, "PYTHONPATH": str(self.root / "src"), "OMP_NUM_THREADS": "1"}
        found = self._run(["-c", "import muster; print(muster.__file__)"]).stdout.strip()
        if not Path(found).is_relative_to(self.root):
            raise SystemExit(f"{self.root} was to be measured, and {found} is imported.")

    def command(self, *words: str) -> Cost:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        begin = time.perf_counter()
        self._run(["-m", "muster", *words])
        seconds = time.perf_counter() - begin
        now = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_s = now.ru_utime - before.ru_utime + now.ru_stime - before.ru_stime
        return Cost(seconds, cpu_s)

    def farm(self, num_tasks: int) -> Cost:
        values = ",".join(map(str, range(num_tasks)))
        return self._new_run("sweep", "noop.py:noop", "--grid", f"i={values}", "--devices", "cpu:2")

    def step(self, num_steps: int) -> Cost:
        """A step on average, by its own clock, and the processor time of the whole training.

        Not the median step: losses are read some steps late, so that the clock of one step has the
        wait for several, and where the waits fall is another matter than what they cost.
        """
        words = ("train", "digits", "--devices", "cpu:1", "--no-tensorboard", "--max-steps")
        cost = self._new_run(*words, str(num_steps))
        lines = (self._folder / "run" / "metrics.jsonl").read_text().splitlines()
        rows = [row for row in map(json.loads, lines) if row["kind"] == "train"]
        steps = [row["seconds"] for row in rows[WARM_STEPS:]]
        return Cost(statistics.fmean(steps), cost.cpu_s)

    def _new_run(self, *words: str) -> Cost:
        shutil.rmtree(self._folder / "run", ignore_errors=True)
        return self.command(*words, "--run-dir", "run", "--quiet", "--monitor-interval", "0")

    def _run(self, words: list[str]) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, *words], cwd=self._folder, env=self._env, text=True,
            stdin=subprocess.DEVNULL, capture_output=True, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            raise SystemExit(f"{self.root}: {' '.join(words)[:200]}:\n{done.stderr[-2000:]}")
        return done


def contests(num_tasks: int, num_steps: int) -> dict[str, Callable[[Checkout], Cost]]:
    plan = ("sweep", "noop.py:noop", "--seeds", "1000", "--devices", "cpu:2", "--dry-run")
    return {
        "muster --help": lambda one: one.command("--help"),
        "muster sweep --help": lambda one: one.command("sweep", "--help"),
        "sweep --dry-run": lambda one: one.command(*plan),
        f"a farm of {num_tasks:,} tasks": lambda one: one.farm(num_tasks),
        f"a step of {num_steps} of digits": lambda one: one.step(num_steps),
    }


def in_pairs(
    measure: Callable[[Checkout], Cost], before: Checkout, now: Checkout, pairs: int
) -> dict[str, object]:
    """``ratio``: of the figures of one pair, now to before."""
    found: dict[Checkout, list[Cost]] = {before: [], now: []}
    for one in (before, now):  # files are read and compiled for the first time
        measure(one)
    for number in range(pairs):
        for one in (before, now) if number % 2 == 0 else (now, before):
            found[one].append(measure(one))
    record: dict[str, object] = {}
    for name in Cost._fields:
        old, new = ([getattr(cost, name) for cost in found[one]] for one in (before, now))
        record[name] = {
            "before": summary(old),
            "now": summary(new),
            "ratio": summary([b / a for a, b in zip(old, new, strict=True)]),
        }
    return record


def unpacked(ref: str, folder: Path) -> Path:
    """The sources of a commit."""
    done = subprocess.run(
        ["git", "-C", str(ROOT), "archive", ref, "src"], check=True, capture_output=True
    )
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as tar:
        tar.extractall(folder, filter="data")
    return folder


def shown(values: dict[str, float], unit: float = 1.0, digits: int = 2) -> str:
    low, middle, high = (values[name] * unit for name in ("low", "median", "high"))
    return f"{middle:,.{digits}f} [{low:,.{digits}f}–{high:,.{digits}f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    other = parser.add_mutually_exclusive_group()
    other.add_argument("--ref", default="HEAD", help="the commit that is the other one")
    other.add_argument("--other", type=Path, help="a checkout that is the other one")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--tasks", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--only", help="measure only what has this in its name")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.quick:
        args.pairs, args.tasks, args.steps = 1, 50, 15
    record: dict[str, object] = {"machine": machine(), "other": str(args.other or args.ref)}
    rows = []
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as name:
        place = Path(name)
        root = args.other or unpacked(args.ref, place / "sources")
        before, now = Checkout(root, place / "before"), Checkout(ROOT, place / "now")
        for title, measure in contests(args.tasks, args.steps).items():
            if args.only is not None and args.only not in title:
                continue
            print(f"  {title}", file=sys.stderr)
            record[title] = found = in_pairs(measure, before, now, args.pairs)
            for field, words in (("seconds", "ms"), ("cpu_s", "cpu, ms")):
                one: dict[str, dict[str, float]] = found[field]  # type: ignore[assignment]
                times = (shown(one["before"], 1e3, 1), shown(one["now"], 1e3, 1))
                rows.append([title, words, *times, shown(one["ratio"], digits=3)])
    about = record["machine"]
    print(f"{about['processor']}, {about['cores']} cores, {about['date']}")  # type: ignore[index]
    print(f"{args.pairs} pairs, beside {record['other']}; medians [least–most]")
    table(["what", "", "before", "now", "now/before"], rows)
    write_json(args.json, record)


if __name__ == "__main__":
    main()
