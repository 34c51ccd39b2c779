"""How listing a plan grows: tasks are listed in a new ledger as the coordinator does it, no worker.

    python benchmarks/listing.py                          # 10⁵, 10⁶ and 10⁷ tasks: minutes
    python benchmarks/listing.py --tasks 10000 100000

Each size is listed by a process of its own. ``cpu``: its processor seconds, with the making of the
tasks and of the index of their keys; ``last turn`` makes that index; ``power``: by which the
processor seconds grow with the number of tasks, fitted over all sizes.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from measuring import growth, machine, table, write_json
from muster.farm.canonical import key_of_payload
from muster.farm.decisions import Policy
from muster.farm.ledger.store import Ledger
from muster.farm.plan import Listing, Plan
from muster.farm.space import Space
from muster.farm.task import NewTask
from muster.run.folder import RunFolder


def list_tasks(folder: Path, count: int) -> dict[str, Any]:
    """List the tasks of a grid of 1,000 values and seeds."""
    begin, before = time.perf_counter(), _cpu_s()
    ledger = Ledger(folder / "ledger.sqlite")
    ledger.begin()
    number = ledger.target_id("noop.py:noop")
    ledger.commit()
    space = Space.from_values(grid={"i": range(1000)}, seeds=count // 1000)
    key_of = key_of_payload("noop.py:noop")
    feed = (NewTask(key_of(payload), number, payload) for payload in space.payloads())
    plan = Plan(
        folder=RunFolder(folder), targets={}, slots=(), policy=Policy(), total=count,
        feed=feed, is_distinct=True, plan_id="many",
    )  # fmt: skip
    listing, last_s = Listing(plan, ledger), 0.0
    while listing.goes_on:
        turn = time.perf_counter()
        ledger.begin()
        listing.add()
        ledger.commit()
        last_s = time.perf_counter() - turn
    assert ledger.last_task() == count
    ledger.close()
    return {
        "tasks": count,
        "seconds": time.perf_counter() - begin,
        "cpu_s": _cpu_s() - before,
        "last_turn_s": last_s,
        "memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "ledger_mib": (folder / "ledger.sqlite").stat().st_size / 2**20,
    }


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", type=int, nargs="+", default=[10**5, 10**6, 10**7])
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.quick:
        args.tasks = [5_000, 10_000, 20_000]
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as name:
        if args.one:
            print(json.dumps(list_tasks(Path(name), args.one)))
            return
        found = []
        for count in args.tasks:
            argv = [sys.executable, __file__, "--one", str(count)]
            done = subprocess.run(argv, check=True, stdout=subprocess.PIPE)
            found.append(json.loads(done.stdout))
            print(found[-1], file=sys.stderr, flush=True)
    about = machine()
    print(f"{about['processor']}, {about['cores']} cores, {about['date']}")
    columns = {"tasks": "tasks", "cpu_s": "processor, s", "seconds": "by the clock, s",
               "last_turn_s": "of it the last turn, s", "memory_mib": "memory, MiB",
               "ledger_mib": "ledger, MiB"}  # fmt: skip
    rows = [[f"{one[key]:,.{1 if key.endswith('s') and key != 'tasks' else 0}f}" for key in columns]
            for one in found]  # fmt: skip
    table([*columns.values()], rows)
    sizes = [one["tasks"] for one in found]
    power = growth("processor time of listing", "tasks", sizes, [one["cpu_s"] for one in found])
    write_json(args.json, {"machine": about, "sizes": found, "power": power})


if __name__ == "__main__":
    main()
