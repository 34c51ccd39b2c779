"""How close unequal tasks come to the best possible end, beside a split made in advance.

    python benchmarks/makespan.py             # 5 sets of 200 tasks on 4 workers: about 3 minutes
    python benchmarks/makespan.py --quick

Tasks sleep for log-normal times, so four workers fit on any machine. ``bound`` is what list
scheduling in the order of submission needs without any overhead (Graham 1966), simulated exactly;
``ideal`` is max(work / workers, longest task), below which nothing can end. The static split gives
task i to worker i mod m, as a job array or a hand-written script does.
"""

from __future__ import annotations

import argparse
import heapq
import random
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import muster
from measuring import goal, machine, summary, table, write_json

TASK = "import time\ndef nap(i: int, s: float):\n    time.sleep(s)\n    return {'slept': s}\n"


def list_scheduling(lengths: list[float], workers: int) -> float:
    """Each task goes to the worker that is free first."""
    free = [0.0] * workers
    for length in lengths:
        heapq.heapreplace(free, free[0] + length)
    return max(free)


def through_muster(lengths: list[float], workers: int, folder: Path) -> float:
    """From the start of the first task to the end of the last, by the tasks' own clocks."""
    (folder / "task.py").write_text(TASK)
    run = muster.sweep(
        f"{folder}/task.py:nap",
        rows=[{"i": i, "s": length} for i, length in enumerate(lengths)],
        devices=f"cpu:{workers}",
        run_dir=folder / "run",
    )
    import sqlite3

    database = sqlite3.connect(run.folder.ledger)
    (span,) = database.execute(
        "SELECT max(started_s + seconds) - min(started_s) FROM attempts"
    ).fetchone()
    database.close()
    assert run.exit_code == 0
    return float(span)


def through_static_split(lengths: list[float], workers: int) -> float:
    def serve(share: list[float]) -> None:
        for length in share:
            time.sleep(length)

    begin = time.perf_counter()
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(serve, [lengths[w::workers] for w in range(workers)]))
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", type=int, default=200)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.quick:
        args.tasks, args.repeats = 40, 1
    ratios: dict[str, list[float]] = {"muster": [], "static split": [], "ideal": []}
    for seed in range(args.repeats):
        rng = random.Random(seed)
        lengths = [min(5.0, 0.05 * rng.lognormvariate(0.0, 1.5)) for _ in range(args.tasks)]
        bound = list_scheduling(lengths, args.workers)
        with tempfile.TemporaryDirectory(prefix="muster-bench-") as name:
            ratios["muster"].append(through_muster(lengths, args.workers, Path(name)) / bound)
        ratios["static split"].append(through_static_split(lengths, args.workers) / bound)
        ratios["ideal"].append(max(sum(lengths) / args.workers, max(lengths)) / bound)
    about = machine()
    print(f"{about['processor']}, {about['cores']} cores, {about['date']}")
    print(f"makespan / list-scheduling bound, {args.tasks} tasks, {args.workers} workers")
    found = {kind: summary(values) for kind, values in ratios.items()}
    rows = [
        [kind, f"{s['median']:.3f}", f"[{s['low']:.3f}–{s['high']:.3f}]"]
        for kind, s in found.items()
    ]
    table(["", "median", "range"], rows)
    ours = found["muster"]["median"]
    goal("makespan, × the bound", "≤ 1.05", f"{ours:.3f}", ours <= 1.05)
    write_json(args.json, {"machine": about, "ratios": found})


if __name__ == "__main__":
    main()
