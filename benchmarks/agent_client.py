"""A scripted agent: 200 experiments of a second, an edit, crashes, a kill. What was lost, or idle?

    python benchmarks/agent_client.py            # about 2 minutes on two cores
    python benchmarks/agent_client.py --quick

It does what SKILL.md says: start a file, look why, edit, start again. Each task writes down when it
begins and ends, so that what was lost, how often it was called and how long workers had nothing to
do is counted from that, and not from what Muster says of itself. Below the share of idle workers
stands where it comes from: until the first task of a command, from its last task until it ends,
between the commands (`muster why`), and while tasks run: after crashes, where fewer tasks
than workers are left, and the second of whoever was killed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from measuring import goal, machine, table, write_json

WORK = """
import json, os, time
from pathlib import Path


def run(x: int, seconds: float = 1.0) -> dict:
    began = time.time()
    with open("begun.txt", "a") as begun:
        begun.write(f"{x}\\n")
    time.sleep(seconds)
    fails = x % 20 == 7 and not Path("repaired").exists()
    crashes = x % 20 == 13 and not Path(f"crashed-{x}").exists()
    end = "failed" if fails else "crashed" if crashes else "done"
    call = {"x": x, "end": end, "pid": os.getpid(), "began": began, "ended": time.time()}
    with open("calls.jsonl", "a") as calls:
        calls.write(json.dumps(call) + "\\n")
    if fails:
        raise ValueError(f"{x} needs the repair")
    if crashes:
        Path(f"crashed-{x}").touch()
        os.kill(os.getpid(), 9)
    return {"y": 2 * x}
"""
FILE = """
command = "sweep"
target = "work.py:run"
devices = "cpu:{workers}"
keep_going = true
grid.seconds = [{seconds}]
grid.x = {xs}
"""


def muster(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "muster", *words]
    return subprocess.run(line, cwd=folder, capture_output=True, text=True, check=False)


def work(folder: Path, num_tasks: int, seconds: float, workers: int) -> dict[str, Any]:
    """Begin with half of the settings, be killed in the middle, add the other half, repair."""
    (folder / "work.py").write_text(WORK)
    began = time.time()

    def write(count: int) -> None:
        text = FILE.format(workers=workers, seconds=seconds, xs=list(range(count)))
        (folder / "e.toml").write_text(text)

    write(num_tasks // 2)
    commands = [[time.time(), 0.0]]
    process = subprocess.Popen(
        [sys.executable, "-m", "muster", "start", "e.toml", "--quiet"], cwd=folder,
        start_new_session=True,
    )  # fmt: skip
    journal = folder / "calls.jsonl"
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline and process.poll() is None:
        if journal.exists() and len(journal.read_text().splitlines()) >= num_tasks // 8:
            break
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    commands[0][1] = time.time()

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command_began = time.time()
        done = muster(folder, *words)
        commands.append([command_began, time.time()])
        return done

    write(num_tasks)  # an edit: the other half as well
    done = run("start", "e.toml", "--quiet")
    assert done.returncode == 1, done.stderr
    told = json.loads(muster(folder, "why", "e", "--json").stdout)
    assert any("needs the repair" in cause["text"] for cause in told["causes"])
    (folder / "repaired").touch()
    assert run("retry", "e", "--quiet").returncode == 0
    wall_s = time.time() - began

    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    seen = [line["x"] for line in lines if line["end"] == "done"]
    begun = [int(line) for line in (folder / "begun.txt").read_text().split()]
    status = json.loads(muster(folder, "status", "e", "--json").stdout)
    # A worker whose task fails after its second was not idle: the second was the user's.
    busy_s = sum(line["ended"] - line["began"] for line in lines)
    return {
        "tasks": num_tasks,
        "done": status["counts"]["done"],
        "lost": sorted(set(range(num_tasks)) - set(seen)),
        "done_again_after_the_kill": len(seen) - len(set(seen)),
        "called_more_than_twice": sorted(x for x, n in Counter(begun).items() if n > 2),
        "wall_s": round(wall_s, 2),
        "idle_percent": round(100 * (1 - busy_s / (workers * wall_s)), 2),
        **{
            f"idle_percent_{where}": round(100 * seconds / (workers * wall_s), 2)
            for where, seconds in idle(commands, lines, workers, wall_s).items()
        },
    }


def idle(
    commands: Sequence[Sequence[float]], calls: Sequence[Mapping[str, Any]], workers: int,
    wall_s: float,
) -> dict[str, float]:  # fmt: skip
    """Seconds of workers without a task, by where; ``commands``: when each began and ended."""
    starting = ending = at_work = 0.0
    for begin, end in commands:
        mine = [call for call in calls if begin <= call["began"] < end]
        first, last = min(call["began"] for call in mine), max(call["ended"] for call in mine)
        starting += workers * (first - begin)
        ending += workers * (end - last)
        at_work += workers * (last - first) - sum(call["ended"] - call["began"] for call in mine)
    between = workers * (wall_s - sum(end - begin for begin, end in commands))
    return {"starting": starting, "ending": ending, "between": between, "at_work": at_work}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    flags = parser.parse_args()
    workers = os.cpu_count() or 1
    num_tasks, seconds = (24, 0.05) if flags.quick else (200, 1.0)
    with tempfile.TemporaryDirectory() as folder:
        found = work(Path(folder), num_tasks, seconds, workers)
    assert not found["lost"] and found["done"] == num_tasks, found
    # What was under way at the kill was called once more than what fails or crashes by itself.
    assert len(found["called_more_than_twice"]) <= workers, found
    table(["what", "value"], [[name, str(value)] for name, value in found.items()])
    idle = found["idle_percent"]
    goal("idle workers", "< 5 %", f"{idle} %", idle < 5)
    write_json(flags.json, {"machine": machine(), "found": found})


if __name__ == "__main__":
    main()
