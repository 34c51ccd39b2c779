"""What the coordinator pays for each worker on a cluster: mailboxes, and SLURM's answer about jobs.

    python benchmarks/many_workers.py [--quick] [--workers 1 10 100 1000] [--json FILE]

The coordinator's own side of the mailboxes (`farm/executors/cluster_slot.py`), beside pilots that
are files made here: no worker runs. Per number of workers, medians of repeats:

- idle: a look at an outbox in which nothing is new;
- orders: handing 8 tasks to a pilot;
- results: hearing 8 results of a pilot.

With SLURM on this machine (SLURM_CONF set, see scripts/slurm-loopback) also: how long squeue takes
to tell of an array of as many held elements. These are the constants of docs/scaling.md.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from measuring import machine, table, write_json
from muster.base.errors import MusterError
from muster.farm import wire
from muster.farm.events import Results
from muster.farm.executors.cluster_slot import ClusterSlot
from muster.farm.executors.mailbox import HELLO, Writer, pilot_box
from muster.farm.executors.remote import pack_event, send_command
from muster.farm.task import Finished, Outcome, SlotSpec, Task
from muster.run.folder import RunFolder
from muster.slurm.commands import elements_of

BATCH = 8
PAYLOAD = b'{"lr":0.001,"width":64,"seed":7}'
VALUE = b'{"loss":0.123456,"accuracy":0.98}'


def slots_with_pilots(folder: RunFolder, count: int) -> tuple[list[ClusterSlot], list[Writer]]:
    cluster_slots, outboxes = [], []
    for slot in range(count):
        box = pilot_box(folder, slot, 1, 0)
        box.folder.mkdir(parents=True)
        outbox = Writer(box.outbox, durable=False)
        outbox.add(wire.pack([HELLO, "host", 1]))
        outbox.flush()
        cluster_slot = ClusterSlot(folder, slot, 1, 0.0)
        cluster_slot.start(slot + 1, SlotSpec(slot_id=slot, label=f"slurm/{slot}", devices=()))
        cluster_slot.look(time.monotonic() + 1)
        cluster_slots.append(cluster_slot)
        outboxes.append(outbox)
    return cluster_slots, outboxes


def per_slot_us(cluster_slots: list[ClusterSlot], act: Callable[[ClusterSlot], Any]) -> float:
    begin = time.perf_counter()
    for cluster_slot in cluster_slots:
        act(cluster_slot)
    return (time.perf_counter() - begin) / len(cluster_slots) * 1e6


def measure(count: int, repeats: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {"idle": [], "orders": [], "results": []}
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as path:
        cluster_slots, outboxes = slots_with_pilots(RunFolder(Path(path)), count)
        tasks = [Task(i, b"k" * 16, 1, PAYLOAD, 0, 1) for i in range(BATCH)]
        finished = [Finished(i, 1, Outcome.OK, 0.0, 0.1, 0, 0, None, VALUE) for i in range(BATCH)]

        later = itertools.count(time.monotonic() + 1000, 1000)

        def look(cluster_slot: ClusterSlot) -> list[Any]:
            return cluster_slot.look(next(later))  # so late that it is always due

        def order(cluster_slot: ClusterSlot) -> None:
            cluster_slot.order(
                cluster_slot.slot_id + 1,
                send_command(cluster_slot.slot_id + 1, tasks, together=False),
            )
            look(cluster_slot)

        heard: list[Any] = []
        for _ in range(repeats):
            found["idle"].append(per_slot_us(cluster_slots, look))
            found["orders"].append(per_slot_us(cluster_slots, order))
            for slot, outbox in enumerate(outboxes):
                outbox.add(pack_event(Results(slot + 1, finished)))
                outbox.flush()
            heard.clear()
            found["results"].append(per_slot_us(cluster_slots, lambda at: heard.extend(look(at))))
            got = sum(len(event.finished) for event in heard if isinstance(event, Results))
            if got != BATCH * count:
                sys.exit(f"{got} results were heard of {BATCH * count}")
    return found


def squeue_ms(count: int, repeats: int) -> list[float] | None:
    """How long it takes to ask for an array of held elements; None without SLURM."""
    if shutil.which("sbatch") is None:
        return None
    name = f"muster-bench-{time.time_ns()}"
    command = ["sbatch", "--parsable", "--hold", f"--array=0-{count - 1}", f"--job-name={name}"]
    done = subprocess.run([*command, "--wrap", "true"], capture_output=True, text=True, check=False)
    if done.returncode:
        return None
    try:
        times = []
        for _ in range(repeats):
            begin = time.perf_counter()
            elements = elements_of(name)
            times.append((time.perf_counter() - begin) * 1e3)
        if len(elements) != count:
            sys.exit(f"squeue told of {len(elements)} elements of {count}")
        return times
    except MusterError:
        return None
    finally:
        subprocess.run(["scancel", done.stdout.strip().split(";")[0]], check=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 10, 100, 1000])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="10 workers, twice")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args()
    counts, repeats = ([10], 2) if options.quick else (options.workers, options.repeats)
    record: dict[str, Any] = {"machine": machine(), "batch": BATCH, "workers": {}}
    rows = []
    for count in counts:
        found: dict[str, Any] = dict(measure(count, repeats))
        found["squeue_ms"] = squeue_ms(count, repeats)
        record["workers"][count] = found
        cells = [f"{median(found[what]):,.0f}" for what in ("idle", "orders", "results")]
        squeue = "-" if found["squeue_ms"] is None else f"{median(found['squeue_ms']):,.0f}"
        rows.append([f"{count:,}", *cells, squeue])
    print(f"{record['machine']['date']}, {repeats} repeats, medians")
    table(
        ["workers", "idle, us", f"{BATCH} orders, us", f"{BATCH} results, us", "squeue, ms"], rows
    )
    write_json(options.json, record)


if __name__ == "__main__":
    main()
