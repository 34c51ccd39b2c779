"""Tasks per second through Muster's Ray actors, beside plain Ray in the same cluster.

    python benchmarks/ray_overhead.py                  # 5 rounds, about 5 minutes
    python benchmarks/ray_overhead.py --quick

One Ray cluster on this machine with two cores serves all contenders in turn. ``one by one``: a
Ray task for each task. ``in chunks``: ``ray.util.multiprocessing.Pool`` with a fiftieth of the
tasks per chunk. Muster records every result durably before it counts as done, Ray keeps them in
memory. ``whole`` counts from the call to its return, with the start of actors and, for muster, the
table in Parquet and CSV; ``steady`` from the first to the last result.

An ``empty`` task sleeps for 0 s, as it always has here: it gives its core away for some 60 µs,
which bounds two workers of any kind at about 30,000 a second. A ``no-op`` does not sleep.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from measuring import alternate, goal, machine, skip, summary, table, write_json

GOAL = 1.0  # times the Pool with chunks, empty tasks
WORKERS = 2
CHUNKS = 50  # that the Pool cuts the tasks into
TARGET = """
import time

def work(i: int, seconds: float):
    if seconds >= 0:
        time.sleep(seconds)
    return {"i": i}
"""


class Contest:
    """Each contender returns its whole rate and leaves its steady rate in ``steady``."""

    def __init__(self, ray: Any, folder: Path, seconds: float, counts: tuple[int, int]) -> None:
        self.ray = ray
        self.folder = folder
        self.seconds = seconds
        self.many, self.few = counts
        self.steady: dict[str, list[float]] = {}
        self.counts: dict[str, int] = {}

    def _note(self, name: str, count: int, begin: float, steady: float) -> float:
        self.steady.setdefault(name, []).append(steady)
        self.counts[name] = count
        return count / (time.perf_counter() - begin)

    def muster(self) -> float:
        import muster
        from muster.farm.executors.cluster import ClusterRequest

        target, run = self.folder / "work.py", self.folder / "run"
        target.write_text(TARGET)
        shutil.rmtree(run, ignore_errors=True)
        begin = time.perf_counter()
        done = muster.sweep(
            f"{target}:work",
            grid={"i": range(self.many), "seconds": [self.seconds]},
            executor="ray",
            cluster=ClusterRequest(num_workers=WORKERS),
            run_dir=run,
        )
        rate = self._note("muster on Ray actors", self.many, begin, _steady(run))
        assert done.exit_code == 0
        return rate

    def one_by_one(self) -> float:
        seconds, begin = self.seconds, time.perf_counter()

        def work(i: int) -> dict[str, int]:
            if seconds >= 0:
                time.sleep(seconds)
            return {"i": i}

        remote = self.ray.remote(num_cpus=1)(work)
        waiting = [remote.remote(i) for i in range(self.few)]
        first = None
        while waiting:
            ended, waiting = self.ray.wait(waiting, num_returns=min(20, len(waiting)))
            self.ray.get(ended)
            if first is None:
                first, missed = time.perf_counter(), len(ended)
        assert first is not None
        steady = (self.few - missed) / (time.perf_counter() - first)
        return self._note("Ray tasks, one by one", self.few, begin, steady)

    def pool(self) -> float:
        from ray.util.multiprocessing import Pool

        seconds, begin, chunk = self.seconds, time.perf_counter(), self.many // CHUNKS

        def work(i: int) -> dict[str, int]:
            if seconds >= 0:
                time.sleep(seconds)
            return {"i": i}

        with Pool(WORKERS) as pool:
            results = pool.imap_unordered(work, range(self.many), chunksize=chunk)
            for _ in range(chunk):
                next(results)
            first = time.perf_counter()
            rest = sum(1 for _ in results)
            steady = rest / (time.perf_counter() - first)
        pool.join()
        return self._note("Ray's Pool, in chunks", self.many, begin, steady)

    def contenders(self) -> dict[str, Callable[[], float]]:
        return {
            "muster on Ray actors": self.muster,
            "Ray tasks, one by one": self.one_by_one,
            "Ray's Pool, in chunks": self.pool,
        }


def _steady(run: Path) -> float:
    database = sqlite3.connect(run / "ledger.sqlite")
    count, seconds = database.execute(
        "SELECT count(*), max(started_s + seconds) - min(started_s) FROM attempts"
    ).fetchone()
    database.close()
    return float(count / (seconds + 0.01))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", type=int, default=10_000, help="empty tasks")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", choices=["empty", "no-op", "10 ms"])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.quick:
        args.tasks, args.repeats = 1_000, 1
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_AUTH_MODE"] = "disabled"
    if not find_spec("ray"):
        skip("Ray is not installed")
    import ray

    rows, record = [], {}
    about = machine("ray")
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as name:
        ray.init(
            address="local", num_cpus=WORKERS, include_dashboard=False, log_to_driver=False,
            logging_level="ERROR", _node_ip_address="127.0.0.2", _temp_dir=f"{name}/ray",
        )  # fmt: skip
        try:
            for label, seconds, many, few in (
                ("empty", 0.0, args.tasks, args.tasks // 5),
                ("no-op", -1.0, args.tasks, args.tasks // 5),
                ("10 ms", 0.01, args.tasks // 5, args.tasks // 5),
            ):
                if args.only not in (None, label):
                    continue
                contest = Contest(ray, Path(name), seconds, (many, few))
                whole = alternate(contest.contenders(), args.repeats)
                ours = summary(contest.steady["muster on Ray actors"])["median"]
                for kind, values in whole.items():
                    steady, all_in = summary(contest.steady[kind]), summary(values)
                    count = contest.counts[kind]
                    record[f"{label}: {kind}"] = {"steady": steady, "whole": all_in, "tasks": count}
                    rows.append(
                        [
                            label,
                            kind,
                            f"{count:,}",
                            f"{steady['median']:,.0f}",
                            f"[{steady['low']:,.0f}–{steady['high']:,.0f}]",
                            f"{all_in['median']:,.0f}",
                            f"[{all_in['low']:,.0f}–{all_in['high']:,.0f}]",
                            f"{ours / steady['median']:.2f}",
                        ]
                    )
        finally:
            ray.shutdown()
    print(f"{about['processor']}, {about['cores']} cores, {about['date']}, {about['versions']}")
    table(
        ["", "", "tasks", "steady/s", "range", "whole/s", "range", "muster is ×"],
        rows,
    )
    if args.only in (None, "empty"):
        ours, pools = (record[f"empty: {kind}"]["steady"]["median"]
                       for kind in ("muster on Ray actors", "Ray's Pool, in chunks"))  # fmt: skip
        goal("empty tasks on Ray, × a Pool with chunks", f"≥ {GOAL:g}", f"{ours / pools:.2f}",
             ours >= GOAL * pools)  # fmt: skip
    write_json(args.json, {"machine": about, "figures": record})


if __name__ == "__main__":
    main()
