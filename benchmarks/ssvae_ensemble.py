"""Runs per minute of the recipe `ssvae`: ensembles beside single trainings, on the embedded digits.

    python benchmarks/ssvae_ensemble.py [--quick] [--cases exact-75 …] [--repeats 3] [--json FILE]

The same runs and settings four times, in turn within every repeat; every form keeps two
cores busy, with one thread per process, and pays for the start of its processes:

- ensemble: two processes, each trains its half of the runs in ensembles (--ensemble-size 8);
- one after another: two processes, each trains its half of the runs one by one;
- one process per run: two at a time;
- by hand: the same, with a program as a careful author writes it (programs/plain_ssvae.py: modules,
  a DataLoader, autograd), which measures nothing on the way; for the exact objective only.

A run is measured every fifth epoch and at its end, as in a sweep. What the start of a process costs
counts less the longer a run is, so the cases differ in length and in work per step: 5 and 75 epochs
of the exact objective, 75 of the sampled one, and 75 of the supervised baseline.

The accuracies of the first three are compared, too: the greatest difference of any run is shown;
of the fourth, whose random numbers are others, the mean.

Goal: the ensemble has 4 times the rate of one process per run. Why it has not: the share of a
core's arithmetic that the products of one run reach, two processes at a time, beside those of an
ensemble. Where they are equal, more runs at once do not make the arithmetic faster, and all that
an ensemble saves is the start of processes.

On a GPU the goal is 20 times, of runs of 75 epochs. None was at hand, so that figure is reckoned
from the kernels of a step (programs/ssvae_planned.py), with the ensembles that a GPU gets by
default and the runs apart one at a time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).parent))
from measuring import alternate, goal, machine, summary, table, write_json
from muster_recipes.ssvae.config import SsvaeConfig
from muster_recipes.ssvae.plan import plan
from muster_recipes.ssvae.tasks import DEFAULT_SIZE

PROGRAMS = Path(__file__).parent / "programs"
ENSEMBLE, IN_TURN, APART = "ensemble", "one after another", "one process per run"
BY_HAND = "by hand, one process per run"
PROCESSES = 2
GOAL = 4.0
GOAL_ON_A_GPU, CARD, EPOCHS_ON_A_GPU = 20.0, "H100 SXM", 75


@dataclass(frozen=True, kw_only=True)
class Case:
    """Which runs are trained: so many seeds of one cell."""

    method: str
    num_runs: int
    num_epochs: int
    unlabelled: Literal["exact", "sampled"] = "exact"


CASES = {
    "exact-5": Case(method="ssvae", num_runs=16, num_epochs=5),
    "exact-75": Case(method="ssvae", num_runs=16, num_epochs=75),
    "sampled-75": Case(method="ssvae", num_runs=16, num_epochs=75, unlabelled="sampled"),
    "supervised-75": Case(method="supervised", num_runs=32, num_epochs=75),
}
QUICK = {"exact-1": Case(method="ssvae", num_runs=2, num_epochs=1)}


def tasks_of(case: Case, ensemble_size: int) -> list[dict[str, Any]]:
    config = SsvaeConfig(
        n_labels=(100,),
        alpha_values=(50.0,),
        corruption_rates=(0.1,),
        num_seeds=case.num_runs,
        num_epochs=case.num_epochs,
        unlabelled=case.unlabelled,
        ensemble_size=ensemble_size,
    )
    return [dict(task.params) for task in plan(config) if task.target == case.method]


def calls_of(form: str, case: Case, ensemble_size: int) -> list[list[dict[str, Any]]]:
    """The tasks of each process of a form."""
    tasks = tasks_of(case, ensemble_size if form == ENSEMBLE else 1)
    if form in (APART, BY_HAND):
        return [[task] for task in tasks]
    return [tasks[start::PROCESSES] for start in range(PROCESSES)]


def call(tasks: Sequence[dict[str, Any]], program: str) -> dict[int, float]:
    """One process: seed of each of its runs to the accuracy at the end."""
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as folder:
        given, made = Path(folder) / "tasks.json", Path(folder) / "results.json"
        given.write_text(json.dumps(list(tasks)))
        done = subprocess.run(
            [sys.executable, PROGRAMS / program, given, made],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        if done.returncode:
            sys.exit(f"a process of the benchmark failed:\n{done.stderr}")
        results = json.loads(made.read_text())
    pairs = zip(tasks, results, strict=True)
    return {task["seed"]: result["accuracy"] for task, result in pairs}


def measure(case: Case, repeats: int, ensemble_size: int, wanted: Sequence[str]) -> dict[str, Any]:
    """Rates of the forms, and how far their results are apart."""
    accuracies: dict[str, dict[int, float]] = {}

    def rate(form: str) -> float:
        calls = calls_of(form, case, ensemble_size)
        program = "plain_ssvae.py" if form == BY_HAND else "ssvae_call.py"
        begin = time.perf_counter()
        with ThreadPoolExecutor(PROCESSES) as pool:
            parts = list(pool.map(lambda tasks: call(tasks, program), calls))
        seconds = time.perf_counter() - begin
        accuracies[form] = {seed: value for part in parts for seed, value in part.items()}
        return 60 * case.num_runs / seconds

    chosen = [form for form in forms_of(case) if form in {ENSEMBLE, APART, *wanted}]
    forms = {form: (lambda form=form: rate(form)) for form in chosen}
    rates = alternate(forms, repeats)
    apart = max(
        abs(accuracies[ENSEMBLE][seed] - accuracies[form][seed])
        for form in {IN_TURN, APART} & {*chosen}
        for seed in accuracies[form]
    )
    means = {form: sum(found.values()) / len(found) for form, found in accuracies.items()}
    return {"rates": rates, "accuracy_difference": apart, "mean_accuracy": means}


def shares(case: Case, ensemble_size: int) -> dict[int, float]:
    """Number of runs at once → the share of a core's arithmetic that they reach, on two cores."""
    task = tasks_of(case, 1)[0]

    def share(num_runs: int) -> float:
        found = run_program("ssvae_flops.py", task, num_runs)
        return float(found["rate"] / found["most"])

    with ThreadPoolExecutor(PROCESSES) as pool:
        return {
            num_runs: sum(pool.map(share, [num_runs] * PROCESSES)) / PROCESSES
            for num_runs in (1, ensemble_size)
        }


def run_program(program: str, task: dict[str, Any], num_runs: int) -> dict[str, Any]:
    """What a program writes about ``num_runs`` of a task at once."""
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as folder:
        given, made = Path(folder) / "task.json", Path(folder) / "result.json"
        given.write_text(json.dumps(task))
        command = [sys.executable, PROGRAMS / program, given, str(num_runs), made]
        subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True)
        found: dict[str, Any] = json.loads(made.read_text())
    return found


def planned(case: Case) -> dict[str, Any]:
    """On a GPU: what the program finds, and by card the ratio of an ensemble to runs apart."""
    task = {**tasks_of(case, 1)[0], "num_epochs": EPOCHS_ON_A_GPU}
    num_runs = DEFAULT_SIZE["cuda"]
    found = run_program("ssvae_planned.py", task, num_runs)
    start, steps = found["start"], found["steps"]
    ratios = {
        card: num_runs * (start + steps * seconds["1"]) / (start + steps * seconds[str(num_runs)])
        for card, seconds in found["seconds"].items()
    }
    return {**found, "num_runs": num_runs, "ratios": ratios}


def forms_of(case: Case) -> tuple[str, ...]:
    is_exact = case.method == "ssvae" and case.unlabelled == "exact"
    return (ENSEMBLE, IN_TURN, APART, *([BY_HAND] if is_exact else []))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ensemble-size", type=int, default=8)
    parser.add_argument(
        "--forms", nargs="*", choices=[IN_TURN, BY_HAND], default=[IN_TURN, BY_HAND],
        help="beside the two that the goal compares",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="two runs of one epoch, once")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args()
    cases = QUICK if options.quick else {name: CASES[name] for name in options.cases}
    repeats = 1 if options.quick else options.repeats
    record: dict[str, Any] = {"machine": machine(), "goal": GOAL, "cases": {}}
    rows = []
    for name, case in cases.items():
        measured = measure(case, repeats, options.ensemble_size, options.forms)
        rates = {form: summary(values) for form, values in measured["rates"].items()}
        for form, figures in rates.items():
            ratio = rates[ENSEMBLE]["median"] / figures["median"]
            spread = f"{figures['low']:,.1f} .. {figures['high']:,.1f}"
            rows.append([name, form, f"{figures['median']:,.1f}", spread, f"{ratio:.2f}"])
        reached = shares(case, min(options.ensemble_size, case.num_runs))
        record["cases"][name] = {**measured, "summary": rates, "case": vars(case),
                                 "shares": reached, "planned": planned(case)}  # fmt: skip
    print(
        f"runs per minute, {PROCESSES} processes of one thread, ensembles of "
        f"{options.ensemble_size}, {repeats} repeats, {record['machine']['date']}"
    )
    table(["case", "form", "runs/min", "spread", "ensemble is x times"], rows)
    for name, found in record["cases"].items():
        rates = found["summary"]
        ratio = rates[ENSEMBLE]["median"] / rates[APART]["median"]
        alone, together = found["shares"].values()
        goal(f"{name}, × one process per run", f"≥ {GOAL}", f"{ratio:.2f}", ratio >= GOAL,
             bound=f"ensembles reach {together:.0%} of a core's arithmetic, runs alone {alone:.0%}",
             )  # fmt: skip
        print(f"{name}: of a core's arithmetic the products of a run reach {alone:.0%}, "
              f"those of an ensemble {together:.0%}")  # fmt: skip
        on_a_gpu = found["planned"]
        kind = name.partition("-")[0]
        goal(f"{kind}-{EPOCHS_ON_A_GPU}, planned on one {CARD}, × one process per run",
             f"≥ {GOAL_ON_A_GPU:.0f}", f"{on_a_gpu['ratios'][CARD]:.1f}",
             on_a_gpu["ratios"][CARD] >= GOAL_ON_A_GPU)  # fmt: skip
        for card, seconds in on_a_gpu["seconds"].items():
            alone, together = seconds.values()
            print(f"{name}: a step on one {card}, reckoned: {1e6 * alone:,.0f} µs alone, "
                  f"{1e6 * together / on_a_gpu['num_runs']:,.0f} per run of {on_a_gpu['num_runs']} "
                  f"({on_a_gpu['kernels']['1']} kernels); runs of {EPOCHS_ON_A_GPU} epochs with "
                  f"their start {on_a_gpu['ratios'][card]:.1f} ×")  # fmt: skip
        print(
            f"{name}: greatest difference of an accuracy {found['accuracy_difference']:.4f}; mean "
            + ", ".join(f"{form} {mean:.4f}" for form, mean in found["mean_accuracy"].items())
        )
    write_json(options.json, record)


if __name__ == "__main__":
    main()
