"""kill -9 of a random process every 0.5–2 s: what is lost, doubled, left behind, repeated.

    python benchmarks/chaos.py                # 5,000 tasks of 20 ms, 2 workers: about 4 minutes
    python benchmarks/chaos.py --quick

Every execution of a task appends its number to a file (O_APPEND), so repetitions are counted
independently of any ledger. A killed coordinator is started again with the same command. Peers run
the same tasks under the same killing of their processes, for as long as they live.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parent))
from measuring import goal, machine, table, write_json

TASK = """
import os, time

def f(i: int):
    time.sleep({seconds})
    handle = os.open({log!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(handle, b"%d\\n" % i)
    os.close(handle)
    return {{"square": i * i}}
"""

POOL = """
import sys
sys.path.insert(0, {folder!r})
from concurrent.futures import ProcessPoolExecutor
from task import f
if __name__ == "__main__":
    with ProcessPoolExecutor(2) as pool:
        results = [future.result() for future in [pool.submit(f, i) for i in range({tasks})]]
    print(len(results))
"""

RAY = """
import sys
sys.path.insert(0, {folder!r})
import ray
from task import f
ray.init(num_cpus=2, include_dashboard=False, _node_ip_address="127.0.0.2",
         logging_level="ERROR", log_to_driver=False)
g = ray.remote(max_retries=3)(f)
print(len(ray.get([g.remote(i) for i in range({tasks})])))
"""


def kill_one(root: psutil.Process, rng: random.Random, *, spare_root: bool) -> str:
    """Kill a random process of the tree; returns its command line's last word."""
    try:
        family = root.children(recursive=True)
    except psutil.Error:
        return ""
    if not spare_root:
        family.append(root)
    family = [process for process in family if process.is_running()]
    if not family:
        return ""
    victim = rng.choice(family)
    try:
        words = victim.cmdline()
        victim.send_signal(signal.SIGKILL)
    except psutil.Error:
        return ""
    return " ".join(words[1:4])


def disturbed(
    command: list[str], folder: Path, rng: random.Random, limit_s: float, *, restart: bool
) -> tuple[int, str, float]:
    """Run ``command`` while killing; again after its own death if ``restart``.

    Returns the number of kills, how it ended, and the seconds it took.
    """
    kills, begin = 0, time.monotonic()
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    while True:
        with (folder / "output").open("ab") as output:
            child = subprocess.Popen(
                command, cwd=folder, stdout=output, stderr=output, env=environment
            )
        root = psutil.Process(child.pid)
        due = time.monotonic() + rng.uniform(0.5, 2.0)
        while child.poll() is None:
            time.sleep(0.02)
            if time.monotonic() - begin > limit_s:
                for process in [*root.children(recursive=True), root]:
                    process.kill()
                child.wait()
                return kills, "hung", time.monotonic() - begin
            if time.monotonic() >= due:
                due = time.monotonic() + rng.uniform(0.5, 2.0)
                kills += bool(kill_one(root, rng, spare_root=not restart))
        if child.returncode == -signal.SIGKILL and restart:
            continue
        ended = "finished" if child.returncode == 0 else f"gave up (exit code {child.returncode})"
        return kills, ended, time.monotonic() - begin


def executions(folder: Path) -> Counter[str]:
    path = folder / "log"
    return Counter(path.read_text().split()) if path.exists() else Counter()


def run_muster(folder: Path, tasks: int, rng: random.Random, limit_s: float) -> dict[str, object]:
    import muster

    values = ",".join(map(str, range(tasks)))
    command = [sys.executable, "-m", "muster", "sweep", "task.py:f", "--grid", f"i={values}"]
    command += ["--devices", "cpu:2", "--run-dir", "run", "--retries", "1000000", "--keep-going"]
    kills, ended, seconds = disturbed(command, folder, rng, limit_s, restart=True)
    time.sleep(2.0)
    orphans = [p.pid for p in psutil.process_iter() if _belongs(p, folder)]
    rows = muster.Run(folder / "run").results().to_pylist()
    done = Counter(row["i"] for row in rows if row["state"] == "done")
    wrong = sum(row["square"] != row["i"] ** 2 for row in rows if row["state"] == "done")
    count = executions(folder)
    return {
        "ended": ended,
        "kills": kills,
        "lost": tasks - len(done),
        "doubled": sum(n - 1 for n in done.values()),
        "wrong": wrong,
        "orphans": len(orphans),
        "repeated": sum(count.values()) - len(count),
        "seconds": round(seconds, 1),
    }


def _belongs(process: psutil.Process, folder: Path) -> bool:
    try:
        return process.cwd() == str(folder) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def run_peer(
    command: list[str], folder: Path, tasks: int, rng: random.Random, limit_s: float
) -> dict[str, object]:
    kills, ended, seconds = disturbed(command, folder, rng, limit_s, restart=False)
    count = executions(folder)
    return {
        "ended": ended,
        "kills": kills,
        "lost": 0 if ended == "finished" else "all results",
        "doubled": "-",
        "wrong": "-",
        "orphans": "-",
        "repeated": sum(count.values()) - len(count),
        "seconds": round(seconds, 1),
    }


def run_parallel(folder: Path, tasks: int, rng: random.Random, limit_s: float) -> dict[str, object]:
    """GNU parallel with --resume: started again after each death, as a user would."""
    script = folder / "one.sh"
    script.write_text(f"sleep {folder.joinpath('seconds').read_text()}; echo $1 >> log\n")
    (folder / "input").write_text("".join(f"{i}\n" for i in range(tasks)))
    command = ["parallel", "-j2", "--resume", "--joblog", "joblog", "-a", "input", "sh", "one.sh"]
    kills, ended, seconds = disturbed(command, folder, rng, limit_s, restart=True)
    count = executions(folder)
    return {
        "ended": ended,
        "kills": kills,
        "lost": tasks - len(count),
        "doubled": "-",
        "wrong": "-",
        "orphans": "-",
        "repeated": sum(count.values()) - len(count),
        "seconds": round(seconds, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", type=int, default=5_000)
    parser.add_argument("--task-seconds", type=float, default=0.02)
    parser.add_argument("--limit", type=float, default=240.0, help="seconds for each contender")
    parser.add_argument("--peer-limit", type=float, default=120.0, help="of those that may hang")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.quick:
        args.tasks, args.limit = 200, 30.0
    results: dict[str, dict[str, object]] = {}
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as name:

        def fresh(kind: str) -> Path:
            folder = Path(name) / kind
            folder.mkdir()
            text = TASK.format(seconds=args.task_seconds, log=str(folder / "log"))
            (folder / "task.py").write_text(text)
            (folder / "seconds").write_text(str(args.task_seconds))
            return folder

        rng = random.Random(args.seed)
        results["muster"] = run_muster(fresh("muster"), args.tasks, rng, args.limit)
        for kind, source in (("ProcessPoolExecutor", POOL), ("Ray tasks", RAY)):
            if source is RAY and not importlib.util.find_spec("ray"):
                print("ray is not installed: not measured", file=sys.stderr)
                continue
            folder = fresh(kind.split()[0])
            code = source.format(folder=str(folder), tasks=args.tasks)
            (folder / "peer.py").write_text(code)
            command = [sys.executable, "peer.py"]
            limit = min(args.limit, args.peer_limit)
            results[kind] = run_peer(command, folder, args.tasks, random.Random(args.seed), limit)
        if shutil.which("parallel"):
            rng = random.Random(args.seed)
            kind = "GNU parallel --resume"
            results[kind] = run_parallel(fresh("parallel"), args.tasks, rng, args.limit)
        else:
            print("GNU parallel is not installed: not measured", file=sys.stderr)
    about = machine("ray")
    print(f"{about['processor']}, {about['cores']} cores, {about['date']}; {args.tasks:,} tasks")
    names = ["ended", "kills", "lost", "doubled", "wrong", "orphans", "repeated", "seconds"]
    rows = [[kind, *(str(result[n]) for n in names)] for kind, result in results.items()]
    table(["", *names], rows)
    ours = results["muster"]
    for name in ("lost", "doubled", "wrong", "orphans"):
        goal(f"random kills, tasks {name}" if name != "orphans" else "random kills, orphans", "0",
             str(ours[name]), ours[name] == 0, at_any_size=True)  # fmt: skip
    most = 4 * int(str(ours["kills"]))  # two tasks in flight on each of two workers
    goal("random kills, executed again", f"≤ {most}", str(ours["repeated"]),
         int(str(ours["repeated"])) <= most, at_any_size=True)  # fmt: skip
    write_json(args.json, {"machine": about, "tasks": args.tasks, "results": results})


if __name__ == "__main__":
    main()
