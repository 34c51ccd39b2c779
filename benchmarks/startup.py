"""Command to first task, commands that only look, and a million tasks in constant memory.

python benchmarks/startup.py                  # 10 starts, then a million tasks: about 2 minutes
python benchmarks/startup.py --quick
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parent))
from measuring import goal, machine, summary, table, write_json

FIRST = "import time\ndef f(i: int):\n    return {'at': time.time()}\n"
NOOP = "def noop(i: int, seed: int = 0):\n    return {'i': i}\n"
PEER = """
import time
from concurrent.futures import ProcessPoolExecutor
def f(i):
    return time.time()
if __name__ == "__main__":
    with ProcessPoolExecutor(2) as pool:
        print(min(pool.map(f, [1, 2])))
"""
MUSTER = [sys.executable, "-m", "muster"]
BARE = "python -c pass"
PLAN = ("sweep", "first.py:f", "--grid", "i=1,2", "--devices", "cpu:1", "--dry-run")
#: Commands that start nothing, and at most how many times a bare interpreter each may take.
LOOKS: dict[str, tuple[Sequence[str], int]] = {
    BARE: (["-c", "pass"], 0),
    "muster --help": (["-m", "muster", "--help"], 4),
    "muster sweep --dry-run": (["-m", "muster", *PLAN], 10),
}


def muster_start(folder: Path, number: int) -> float:
    begin = time.time()
    args = ["sweep", "first.py:f", "--grid", "i=1,2", "--devices", "cpu:2", "--quiet"]
    subprocess.run([*MUSTER, *args, "--run-dir", f"start-{number}"], cwd=folder, check=True)
    out = folder / f"start-{number}" / "out.jsonl"
    subprocess.run(
        [*MUSTER, "export", f"start-{number}", "--to", str(out)],
        cwd=folder,
        check=True,
        capture_output=True,
    )
    return min(json.loads(line)["at"] for line in out.read_text().splitlines()) - begin


def peer_start(folder: Path) -> float:
    begin = time.time()
    done = subprocess.run(
        [sys.executable, "peer.py"], cwd=folder, check=True, capture_output=True, text=True
    )
    return float(done.stdout) - begin


def looking_s(folder: Path, words: Sequence[str]) -> float:
    """Processor seconds of a command that starts nothing."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *words], cwd=folder, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def many(folder: Path, tasks: int) -> dict[str, Any]:
    """Watch the coordinator of a large sweep from outside."""
    begin = time.perf_counter()
    args = ["sweep", "noop.py:noop", "--grid", "i=" + ",".join(map(str, range(1000)))]
    args += ["--seeds", str(tasks // 1000), "--devices", "cpu:2", "--run-dir", "many", "--quiet"]
    child = psutil.Popen([*MUSTER, *args], cwd=folder)
    memory: list[tuple[float, float]] = []
    enqueued = drained = None
    while child.poll() is None:
        time.sleep(0.2)
        now = time.perf_counter() - begin
        try:
            memory.append((now, child.memory_info().rss / 2**20))
        except psutil.Error:
            break
        if enqueued is None or drained is None:
            events = _events(folder / "many" / "events.jsonl")
            enqueued = enqueued or ("enqueued" in events and now) or None
            drained = drained or ("end" in events and now) or None
    whole = time.perf_counter() - begin
    at = [values for _, values in memory]
    return {
        "tasks": tasks,
        "exit_code": child.wait(),
        "enqueued_s": enqueued,
        "drained_s": drained,
        "whole_s": whole,
        "tasks_per_s": tasks / drained if drained else None,
        "rss_mib_at_10_50_90_percent": [round(at[int(len(at) * q)]) for q in (0.1, 0.5, 0.9)],
        "peak_rss_mib": round(max(at)),
    }


def _events(path: Path) -> set[str]:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return set()
    return {json.loads(line)["event"] for line in lines}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.quick:
        args.tasks, args.repeats = 5_000, 2
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as name:
        folder = Path(name)
        (folder / "first.py").write_text(FIRST)
        (folder / "noop.py").write_text(NOOP)
        (folder / "peer.py").write_text(PEER)
        ours, peers = [], []
        looks: dict[str, list[float]] = {name: [] for name in LOOKS}
        for number in range(args.repeats):
            for name, (words, _) in LOOKS.items():
                looks[name].append(looking_s(folder, words))
            ours.append(muster_start(folder, number))
            peers.append(peer_start(folder))
        large = many(folder, args.tasks)
    about = machine()
    print(f"{about['processor']}, {about['cores']} cores, {about['date']}")
    starts = [("muster", summary(ours)), ("ProcessPoolExecutor script", summary(peers))]
    table(
        ["from the command to the first task", "median", "range"],
        [[kind, f"{s['median']:.3f} s", f"[{s['low']:.3f}–{s['high']:.3f}]"] for kind, s in starts],
    )
    middle = starts[0][1]["median"]
    goal("command to first task, s", "< 0.5", f"{middle:.3f}", middle < 0.5)
    rows = []
    for name, (_, most) in LOOKS.items():
        values = summary(looks[name])
        times = [one / bare for one, bare in zip(looks[name], looks[BARE], strict=True)]
        ratio = summary(times)["median"]
        spread = f"[{1e3 * values['low']:.0f}–{1e3 * values['high']:.0f}]"
        rows.append([name, f"{1e3 * values['median']:.0f}", spread, f"{ratio:.1f}"])
        if most:
            goal(f"{name}, × a bare interpreter", f"< {most}", f"{ratio:.1f}", ratio < most)
    table(["processor time", "ms", "range", "× a bare interpreter"], rows)
    at_shares = large.pop("rss_mib_at_10_50_90_percent")
    rows = [
        ["all listed after", f"{large['enqueued_s']:.1f} s"],
        ["all done after", f"{large['drained_s']:.1f} s"],
        ["tables written after", f"{large['whole_s']:.1f} s"],
        ["tasks a second until all are done", f"{large['tasks_per_s']:,.0f}"],
        ["coordinator's memory at 10, 50, 90 %, MiB", ", ".join(map(str, at_shares))],
        ["its highest", f"{large['peak_rss_mib']} MiB"],
    ]
    table([f"{args.tasks:,} empty tasks", ""], rows)
    if args.tasks == 1_000_000:
        listed, ended, whole = (large[f"{name}_s"] for name in ("enqueued", "drained", "whole"))
        goal("a million tasks listed, s", "< 6", f"{listed:.1f}", listed < 6)
        goal("the table of a million, s", "< 4", f"{whole - ended:.1f}", whole - ended < 4)
    write_json(
        args.json,
        {
            "machine": about,
            "muster": starts[0][1],
            "pool": starts[1][1],
            "many": large,
            "looks_s": looks,
        },
    )


if __name__ == "__main__":
    main()
