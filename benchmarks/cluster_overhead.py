"""Tasks per second on SLURM through Muster's pilots, beside one job per task and submitit.

    python benchmarks/cluster_overhead.py              # 3 rounds, about 6 minutes
    python benchmarks/cluster_overhead.py --quick

A SLURM on loopback (scripts/slurm-loopback) serves all contenders in turn, each with two elements
at a time. ``one job per task``: ``sbatch --array`` whose elements run one Python call each, which
writes its result to a file. ``submitit``: its own ``map_array``, until all results are read.
Muster and they count from the call to the last result in hand; ``steady`` leaves out the start of
Muster's pilots and the closing of the run: from the begin of the first task to the end of the last.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from measuring import alternate, goal, machine, skip, summary, table, write_json

SCRIPT = Path(__file__).parents[1] / "scripts" / "slurm-loopback"
WORKERS = 2
GOAL = 50.0
TARGET = """
import time

def work(i, seconds):
    time.sleep(seconds)
    return {"i": i}
"""
JOB = """\
#!/bin/bash
#SBATCH --array=0-{last}%{workers}
#SBATCH --output=/dev/null
#SBATCH --mem=100M
{python} -c "import json, work; \
json.dump(work.work($SLURM_ARRAY_TASK_ID, {seconds}), open('out/$SLURM_ARRAY_TASK_ID', 'w'))"
"""


class Contest:
    """Each contender returns its rate; Muster leaves its steady rate in ``steady``."""

    def __init__(self, folder: Path, seconds: float, counts: tuple[int, int]) -> None:
        self.folder = folder
        self.seconds = seconds
        self.many, self.few = counts
        self.steady: list[float] = []
        (folder / "work.py").write_text(TARGET)

    def muster(self) -> float:
        import muster
        from muster.farm.executors.cluster import ClusterRequest

        run = self.folder / "run"
        shutil.rmtree(run, ignore_errors=True)
        begin = time.perf_counter()
        done = muster.sweep(
            f"{self.folder / 'work.py'}:work",
            grid={"i": range(self.many), "seconds": [self.seconds]},
            executor="slurm",
            cluster=ClusterRequest(num_workers=WORKERS, memory="100M"),
            run_dir=run,
            monitor_interval_s=0,
        )
        seconds = time.perf_counter() - begin
        assert done.exit_code == 0
        database = sqlite3.connect(run / "ledger.sqlite")
        count, steady_s = database.execute(
            "SELECT count(*), max(started_s + seconds) - min(started_s) FROM attempts"
        ).fetchone()
        database.close()
        assert count == self.many
        self.steady.append(count / steady_s)
        return self.many / seconds

    def one_job_per_task(self) -> float:
        out = self.folder / "out"
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        text = JOB.format(
            last=self.few - 1, workers=WORKERS, python=sys.executable, seconds=self.seconds
        )
        begin = time.perf_counter()
        subprocess.run(
            ["sbatch"], input=text, text=True, cwd=self.folder, check=True, capture_output=True
        )
        while len(os.listdir(out)) < self.few:
            time.sleep(0.02)
        rate = self.few / (time.perf_counter() - begin)
        self._await_quiet()
        return rate

    def submitit(self) -> float:
        import submitit

        sys.path.insert(0, str(self.folder))
        os.environ["PYTHONPATH"] = os.pathsep.join([str(self.folder), *filter(None, [_PATH])])
        import work

        begin = time.perf_counter()
        logging.getLogger("submitit").setLevel(logging.ERROR)
        executor = submitit.SlurmExecutor(folder=self.folder / "submitit")
        executor.update_parameters(time=60, mem="100M", array_parallelism=WORKERS, wckey=None)
        jobs = executor.map_array(work.work, range(self.few), [self.seconds] * self.few)
        results = [job.result() for job in jobs]
        assert len(results) == self.few
        rate = self.few / (time.perf_counter() - begin)
        self._await_quiet()
        return rate

    def _await_quiet(self) -> None:
        while subprocess.run(["squeue", "-h"], capture_output=True, text=True).stdout.strip():
            time.sleep(0.05)

    def contenders(self) -> dict[str, Callable[[], float]]:
        return {
            "muster's pilots": self.muster,
            "one job per task": self.one_job_per_task,
            "submitit map_array": self.submitit,
        }


_PATH = os.environ.get("PYTHONPATH", "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if shutil.which("slurmctld") is None:
        skip("SLURM is not installed")
    #: length of a task → how many for Muster, how many for the others
    sizes = {0.0: (4000, 30), 0.1: (400, 30), 1.0: (40, 20)}
    if args.quick:
        args.repeats, sizes = 1, {0.0: (400, 4)}
    rows, record = [], {}
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as name:
        cluster = Path(name) / "slurm"
        words = [sys.executable, str(SCRIPT)]
        subprocess.run(
            [*words, "up", str(cluster), f"--with-pid={os.getpid()}"], check=True,
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        os.environ["SLURM_CONF"] = str(cluster / "slurm.conf")
        try:
            for seconds, counts in sizes.items():
                print(f"tasks of {seconds:g} s", file=sys.stderr)
                folder = Path(name) / f"tasks-{seconds:g}"
                folder.mkdir()
                sys.modules.pop("work", None)
                contest = Contest(folder, seconds, counts)
                rates = alternate(contest.contenders(), args.repeats)
                rates["muster's pilots, steady"] = contest.steady
                record[f"{seconds:g} s"] = {k: summary(v) for k, v in rates.items()}
                for contender, values in rates.items():
                    found = summary(values)
                    spread = f"{found['low']:,.2f}-{found['high']:,.2f}"
                    rows.append([f"{seconds:g} s", contender, f"{found['median']:,.2f}", spread])
        finally:
            subprocess.run([*words, "down", str(cluster)], check=True)
    table(["task", "contender", "tasks/s", "spread"], rows)
    for length, found in record.items():
        steady = found["muster's pilots, steady"]["median"]
        whole = found["muster's pilots"]["median"]
        for other in ("one job per task", "submitit map_array"):
            factor, whole_factor = (rate / found[other]["median"] for rate in (steady, whole))
            measured = f"{factor:,.1f} steady, {whole_factor:,.1f} with start and end"
            seconds = float(length.split()[0])
            most = seconds and WORKERS / seconds / found[other]["median"]
            bound = f"{most:,.1f}: {WORKERS} workers that never wait" if most else ""
            goal(f"tasks of {length}, × {other}", f"≥ {GOAL:g}", measured, factor >= GOAL,
                 bound=bound)  # fmt: skip
    write_json(args.json, {"machine": machine("submitit"), "rates": record})


if __name__ == "__main__":
    main()
