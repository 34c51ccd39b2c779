"""Peak memory of the coordinator and of a worker of ``muster map`` against the number of records.

    python benchmarks/map_memory.py                 # 10,000, 100,000 and 1,000,000 records of 1 kB
    python benchmarks/map_memory.py --quick

Goal: no more than 10 % growth from the smallest to the largest. The figure is the resident set
(its shared pages too), read every 20 ms from /proc of every process of the run; the peak of the
coordinator is the kernel's own high-water mark when it can still be read.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parent))
from measuring import goal, machine, table, write_json

STAGE = "def same(record):\n    return record\n"
GOAL = 1.10


def write_input(path: Path, count: int) -> None:
    text = "x" * 960
    with path.open("w") as file:
        for n in range(count):
            file.write(f'{{"n": {n:9d}, "text": "{text}", "tag": "t{n % 97:3d}"}}\n')


def peaks(process: subprocess.Popen[bytes]) -> tuple[float, float]:
    """MiB of the coordinator and of its largest worker."""
    top = psutil.Process(process.pid)
    coordinator = worker = 0.0
    while process.poll() is None:
        try:
            coordinator = max(coordinator, _high_mib(process.pid))
            for child in top.children(recursive=True):
                if "muster.farm.worker.main" in " ".join(child.cmdline()):
                    worker = max(worker, _high_mib(child.pid))
        except (psutil.Error, OSError):
            pass
        time.sleep(0.02)
    return coordinator, worker


def _high_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    return 0.0


def measure(count: int, suffix: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as name:
        folder = Path(name)
        (folder / "stage.py").write_text(STAGE)
        write_input(folder / "in.jsonl", count)
        command = [
            *(sys.executable, "-m", "muster", "map", "stage.py:same", "--input", "in.jsonl"),
            *("--output", f"out.{suffix}", "--devices", "cpu:2", "--quiet", "--run-dir", "run"),
        ]
        began = time.monotonic()
        process = subprocess.Popen(command, cwd=folder, env=dict(os.environ))
        coordinator, worker = peaks(process)
        seconds = time.monotonic() - began
        if process.returncode != 0:
            raise SystemExit(f"muster map failed on {count} records")
    print(f"  {suffix} {count}: {coordinator:.0f} and {worker:.0f} MiB", file=sys.stderr)
    return {
        "format": suffix,
        "records": count,
        "coordinator_mib": coordinator,
        "worker_mib": worker,
        "records_per_s": count / seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="2,000 and 20,000 records")
    parser.add_argument("--records", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--formats", nargs="+", default=["jsonl", "parquet"])
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    counts = [2_000, 20_000] if args.quick else args.records
    rows = [measure(count, suffix) for suffix in args.formats for count in counts]
    print()
    table(
        ["output", "records", "coordinator MiB", "worker MiB", "records/s"],
        [
            [
                row["format"],
                f"{row['records']:,}",
                f"{row['coordinator_mib']:,.0f}",
                f"{row['worker_mib']:,.0f}",
                f"{row['records_per_s']:,.0f}",
            ]
            for row in rows
        ],
    )
    print()
    for suffix in args.formats:
        own = [row for row in rows if row["format"] == suffix]
        for what in ("coordinator_mib", "worker_mib"):
            growth = own[-1][what] / own[0][what]
            goal(f"{suffix}, growth of {what}, ×", f"≤ {GOAL}", f"{growth:.2f}", growth <= GOAL)
    write_json(args.json, {"machine": machine(), "rows": rows})


if __name__ == "__main__":
    main()
