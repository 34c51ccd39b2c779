"""Seconds from the decision to end a trial to the start of the next one on its worker.

    python benchmarks/search_stop.py               # 40 trials of each kind, about a minute

Three kinds of trial, all far from their end when they are stopped: a function that logs on, one
that never looks up again (its worker is killed half a second after it was told), and a program,
which gets SIGTERM. The moments are those of the ledger: of a decision, and of the first number of
the next trial in the same worker's place.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from measuring import goal, machine, summary, table, write_json
from muster.farm.ledger.read import LedgerReader
from muster.farm.metrics import curves_of

TARGET = """
import json, os, sys, time

def logs_on(lr: float, ctx):
    for step in range(1, 100_000):
        ctx.log(step, loss=lr)
        time.sleep(0.01)

def never_looks_up(lr: float, ctx):
    for step in (1, 2):
        ctx.log(step, loss=lr)
    time.sleep(600)

if __name__ == "__main__":
    with open(os.environ["MUSTER_METRICS"], "a") as file:
        for step in (1, 2):
            print(json.dumps({"step": step, "loss": float(sys.argv[1])}), file=file, flush=True)
    time.sleep(600)
"""
KINDS = {
    "a function that logs on": ["trial.py:logs_on"],
    "a function that never looks up": ["trial.py:never_looks_up"],
    "a program": ["--", sys.executable, "trial.py", "{lr}"],
}
#: Task and moment of each decision, and the tasks of each place in their order.
STOPS = """
SELECT p.task_id, json_extract(d.body, '$.time_s') FROM search d JOIN search p
ON p.kind = 'proposal' AND json_extract(p.body, '$.trial') = json_extract(d.body, '$.trial')
WHERE d.kind = 'decision'
"""
TASKS = """
SELECT slot_id, attempts.task_id FROM attempts JOIN workers USING (worker_id)
ORDER BY slot_id, attempts.task_id
"""


def waits(folder: Path, words: list[str], trials: int) -> list[float]:
    """The seconds after each stop whose slot has begun another trial."""
    (folder / "trial.py").write_text(TARGET)
    command, target = ([], words) if words[0] != "--" else (words, [])
    subprocess.run(
        [sys.executable, "-m", "muster", "sweep", *target, "--space", "lr=uniform(0,1)",
         "--minimize", "loss", "--trials", str(trials), "--stop", "asha-stop:min=1,max=1",
         "--devices", "cpu:2", "--monitor-interval", "0", "--quiet", "--run-dir", "it", *command],
        cwd=folder, check=True, env=os.environ,
    )  # fmt: skip
    with LedgerReader(folder / "it" / "ledger.sqlite") as reader:
        decided: dict[int, float] = dict(reader._db.execute(STOPS))
        tasks = reader._db.execute(TASKS).fetchall()
        began = {task: curves_of(reader, task)["loss"].time_s[0] for _, task in tasks}
    return [
        began[after[1]] - decided[before[1]]
        for before, after in itertools.pairwise(tasks)
        if before[0] == after[0]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--quick", action="store_true", help="4 trials")
    parser.add_argument("--json", type=Path)
    flags = parser.parse_args()
    trials = 4 if flags.quick else flags.trials
    found: dict[str, Any] = {}
    for name, words in KINDS.items():
        with tempfile.TemporaryDirectory() as place:
            found[name] = summary(waits(Path(place), words, trials))
    table(
        ["trial", "median s", "lowest", "highest", "stops"],
        [[name, *(f"{row[k]:.3f}" for k in ("median", "low", "high")), str(row["repeats"])]
         for name, row in found.items()],
    )  # fmt: skip
    for name, row in found.items():
        goal(f"after a stop the next trial begins, {name}, s", "≤ 1", f"{row['median']:.3f}",
             row["median"] <= 1)  # fmt: skip
    write_json(flags.json, {"machine": machine(), "seconds": found})


if __name__ == "__main__":
    main()
