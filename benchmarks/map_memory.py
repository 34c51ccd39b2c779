"""Peak memory of the coordinator and of a worker of ``muster map`` against the number of records.

    python benchmarks/map_memory.py                 # 10,000, 100,000 and 1,000,000 records of 1 kB
    python benchmarks/map_memory.py --quick

From JSON lines to both formats, and from Parquet, in row groups of 10,000 rows, to Parquet.
Goals: the coordinator grows by no more than 3 % from the smallest to the largest and stays below
100 MiB; a worker, and the processes that read and write Parquet for the coordinator, by no more
than 10 %. The figure is the kernel's high-water mark of the resident set, shared pages too, read
every 20 ms of every process.
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
import pyarrow as pa
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).parent))
from measuring import goal, machine, table, write_json

#: Input and output.
WAYS = ["jsonl-jsonl", "jsonl-parquet", "parquet-parquet"]
GROUP = 10_000
STAGE = "def same(record):\n    return record\n"
GROWTH = {"coordinator_mib": 1.03, "worker_mib": 1.10, "apart_mib": 1.10}
MOST_MIB = 100
NAMES = {
    "coordinator_mib": "the coordinator's memory", "worker_mib": "a worker's memory",
    "apart_mib": "the memory of what reads and writes Parquet",
}  # fmt: skip
#: What the processes below the coordinator are, by a module of their command line.
CHILDREN = {"muster.farm.worker.main": "worker_mib", "muster.pipeline.apart": "apart_mib"}


def write_input(path: Path, count: int) -> None:
    text = "x" * 960
    if path.suffix == ".jsonl":
        with path.open("w") as file:
            for n in range(count):
                file.write(f'{{"n": {n:9d}, "text": "{text}", "tag": "t{n % 97:3d}"}}\n')
        return
    schema = pa.schema([("n", pa.int64()), ("text", pa.string()), ("tag", pa.string())])
    with pq.ParquetWriter(path, schema) as writer:
        for first in range(0, count, GROUP):
            rows = [
                {"n": n, "text": f"{text}{n}", "tag": f"t{n % 97:3d}"}
                for n in range(first, min(count, first + GROUP))
            ]
            writer.write_table(pa.Table.from_pylist(rows, schema), GROUP)


def peaks(process: subprocess.Popen[bytes]) -> dict[str, float]:
    """MiB of the coordinator, of its largest worker and of what is apart; 0 of none."""
    top = psutil.Process(process.pid)
    found = dict.fromkeys(GROWTH, 0.0)
    while process.poll() is None:
        try:
            found["coordinator_mib"] = max(found["coordinator_mib"], _high_mib(process.pid))
            for child in top.children(recursive=True):
                words = child.cmdline()
                for name in (CHILDREN[word] for word in words if word in CHILDREN):
                    found[name] = max(found[name], _high_mib(child.pid))
        except (psutil.Error, OSError):
            pass
        time.sleep(0.02)
    return found


def _high_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    return 0.0


def measure(count: int, way: str) -> dict[str, Any]:
    before, suffix = way.split("-")
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as name:
        folder = Path(name)
        (folder / "stage.py").write_text(STAGE)
        write_input(folder / f"in.{before}", count)
        command = [
            *(sys.executable, "-m", "muster", "map", "stage.py:same", "--input", f"in.{before}"),
            *("--output", f"out.{suffix}", "--devices", "cpu:2", "--quiet", "--run-dir", "run"),
        ]
        began = time.monotonic()
        process = subprocess.Popen(command, cwd=folder, env=dict(os.environ))
        found = peaks(process)
        seconds = time.monotonic() - began
        if process.returncode != 0:
            raise SystemExit(f"muster map failed on {count} records")
    shown = ", ".join(f"{mib:.0f}" for mib in found.values())
    print(f"  {way} {count}: {shown} MiB", file=sys.stderr)
    return {"way": way, "records": count, **found, "records_per_s": count / seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="2,000 and 20,000 records")
    parser.add_argument("--records", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    counts = [2_000, 20_000] if args.quick else args.records
    rows = [measure(count, way) for way in args.ways for count in counts]
    print()
    table(
        ["way", "records", "coordinator MiB", "worker MiB", "apart MiB", "records/s"],
        [
            [
                row["way"],
                f"{row['records']:,}",
                f"{row['coordinator_mib']:,.0f}",
                f"{row['worker_mib']:,.0f}",
                f"{row['apart_mib']:,.0f}",
                f"{row['records_per_s']:,.0f}",
            ]
            for row in rows
        ],
    )
    print()
    for way in args.ways:
        own = [row for row in rows if row["way"] == way]
        for what, most in GROWTH.items():
            if own[0][what]:
                growth = own[-1][what] / own[0][what]
                goal(f"{way}, growth of {NAMES[what]}, ×", f"≤ {most}",
                     f"{growth:.2f} ({own[0]['records']:,} to {own[-1]['records']:,} records)",
                     growth <= most)  # fmt: skip
        peak = max(row["coordinator_mib"] for row in own)
        goal(f"{way}, coordinator, MiB", f"< {MOST_MIB}", f"{peak:.0f}", peak < MOST_MIB)
    write_json(args.json, {"machine": machine(), "rows": rows})


if __name__ == "__main__":
    main()
