"""Decisions each second, and memory, of a search with many trials.

    python benchmarks/search_decisions.py --trials 10000 --rule asha

Every report of a trial that comes to a rung is one decision. What is printed for each thousand of
trials says whether a decision gets dearer: it should not.
"""

from __future__ import annotations

import argparse
import resource
import time
from pathlib import Path
from random import Random

from measuring import growth, machine, table, write_json
from muster.search.records import Ending, Point
from muster.search.search import Search
from muster.search.space import Space
from muster.search.spec import Budget, SearchSpec, Stopping, objectives


def decide_all(flags: argparse.Namespace) -> list[dict[str, float]]:
    """A row for each tenth of the trials: what was done until then, and how long it took."""
    rows: list[dict[str, float]] = []
    search = Search(
        SearchSpec(
            space=Space.from_texts(["lr=log(1e-5,1e-1)", "width=int(16,256)"]),
            objectives=objectives(minimize=["loss"]),
            sampler=flags.sampler,
            budget=Budget(trials=flags.trials),
            stopping=Stopping.from_text(flags.rule),
        )
    )
    random, decisions, heard, asking, hearing = Random(0), 0, 0, 0.0, 0.0
    waiting: list[tuple[int, int]] = []
    while True:
        started = time.process_time()
        asked = search.ask(1)
        asking += time.process_time() - started
        waiting += [(proposal.trial, 0) for proposal in asked]
        if not waiting:
            break
        trial, step = waiting.pop()
        started = time.process_time()
        while search.is_wanted(trial) and step < 81:
            step += 1
            found = search.heard(trial, None, [Point("loss", step, random.random() + 1 / step)])
            heard += 1
            decisions += len(found)
            waiting += [(d.trial, int(d.rung or 0)) for d in found
                        if d.kind == "promote" and d.trial != trial]  # fmt: skip
        if step == 81:
            search.ended(trial, None, Ending("done"))
        hearing += time.process_time() - started
        if asked and len(search.trials) % max(1, flags.trials // 10) == 0:
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            trials = len(search.trials)
            rows.append({
                "trials": trials, "decisions": decisions, "reports": heard,
                "decisions_per_s": decisions / hearing, "asks_per_s": trials / asking,
                "mib": memory, "seconds": hearing + asking,
            })  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="500 trials")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rule", default="asha:max=81")
    parser.add_argument("--sampler", default="random")
    flags = parser.parse_args()
    if flags.quick:
        flags.trials = 500
    every = [decide_all(flags) for _ in range(flags.repeats)]
    # The least of each: decisions are the same every time, and other work only adds to them.
    rows = [min(same, key=lambda row: row["seconds"]) for same in zip(*every, strict=True)]
    heads = ["trials", "decisions", "reports", "decisions/s", "asks/s", "MiB"]
    table(heads, [[f"{value:,.0f}" for value in [*row.values()][:6]] for row in rows])
    sizes = [row for row in rows if row["trials"] in (rows[0]["trials"], rows[-1]["trials"])]
    sizes.insert(1, rows[len(rows) // 3])
    # Not by trials: of more trials a rule promotes a larger part, and each hears more reports.
    growth("processor time of a search's decisions", "reports",
           [int(row["reports"]) for row in sizes], [row["seconds"] for row in sizes])  # fmt: skip
    write_json(flags.json, {"machine": machine("optuna"), "rule": flags.rule, "rows": rows})


if __name__ == "__main__":
    main()
