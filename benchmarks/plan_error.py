"""How wrong `muster plan` is: predicted against published, and against measured on this machine.

    python benchmarks/plan_error.py            # about 10 minutes
    python benchmarks/plan_error.py --quick    # one small case, once
    python benchmarks/plan_error.py --only published

Published: each training of ``muster.plan.published`` is planned from the others alone; its figure
should lie in the interval. Nothing is measured for that.

For each case: the α and β of gloo between two ranks are measured, `muster plan TASK --calibrate`
measures steps on *one* rank and predicts one and two, and then `muster train` runs on one and on
two. Of two processes only α and β of the link, and how much single ranks slow each other side by
side, go into the prediction; no step of a gang does.
A rank has one thread. What is compared is the median step; the error is (predicted - measured) /
measured. Waiting for gradients is waiting for the slower rank as well, which the model leaves out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from measuring import goal, machine, summary, table, write_json
from muster.api.look.plan import known_model, plan_training
from muster.base.settings import Settings
from muster.plan.prices import DEFAULT_PRICES, parse_prices
from muster.plan.published import PUBLISHED, Published, of_kind, reach
from muster.plan.request import PlanRequest

HERE = Path(__file__)
MLP = f"{HERE.parent / 'programs' / 'mlp.py'}:Mlp"
#: Elements of fp32 in the two messages of a measurement of the link: 64 bytes and 4 MiB.
SMALL, LARGE = 16, 2**20
_ROUNDS = 40
GOAL_PUBLISHED, GOAL_ERROR = 12, 0.2


@dataclass(frozen=True)
class Case:
    title: str
    task: str
    flags: tuple[str, ...]
    batch: int


CASES = (
    Case("MLP 784-512-512-10", MLP, ("--inputs", "784", "--hidden", "512"), 256),
    Case("MLP 784-1024-1024-10", MLP, ("--inputs", "784", "--hidden", "1024"), 512),
    Case("digits, CNN of width 32", "digits", ("--width", "32"), 128),
    Case("digits, CNN of width 64", "digits", ("--width", "64"), 256),
)


def measure_link(target: Path) -> None:
    """One of two ranks: α from small messages, β from large ones. Rank 0 writes both."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    typical_s = {}
    for size in (SMALL, LARGE):
        data = torch.zeros(size)
        taken = []
        for _ in range(_ROUNDS):
            began = time.perf_counter()
            dist.all_reduce(data)
            taken.append(time.perf_counter() - began)
        typical_s[size] = statistics.median(taken[5:])
    if dist.get_rank() == 0:
        # On two ranks a ring costs 2 α + B/β, so the small one is 2 α.
        alpha_s = typical_s[SMALL] / 2
        beta = 4 * LARGE / max(1e-9, typical_s[LARGE] - typical_s[SMALL])
        target.write_text(json.dumps({"latency_us": alpha_s * 1e6, "bandwidth_gb_s": beta / 1e9}))
    dist.destroy_process_group()


def muster(*words: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "muster", *words],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"muster {' '.join(words)} failed:\n{done.stdout}\n{done.stderr[-3000:]}")
    return done.stdout


def found_link(folder: Path) -> dict[str, float]:
    target = folder / "link.json"
    muster("run", "--devices", "cpu:2", "--quiet", "--run-dir", "link", str(HERE),
           "--measure-link", str(target), folder=folder)  # fmt: skip
    link: dict[str, float] = json.loads(target.read_text())
    return link


def run_case(case: Case, num_steps: int) -> dict[str, Any]:
    """One round of a case: predicted and measured median steps, in milliseconds."""
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as name:
        folder = Path(name)
        link = found_link(folder)
        words = ["plan", case.task, "--calibrate", "--calibrate-steps", str(num_steps)]
        words += ["--devices", "cpu:2", "--global-batch", str(case.batch), "--json"]
        given = ["--link-latency-us", f"{link['latency_us']:.3f}"]
        given += ["--link-bandwidth-gb-s", f"{link['bandwidth_gb_s']:.4f}"]
        plan = json.loads(muster(*words, *given, "--for-run", "ranks-1", "--", *case.flags,
                                 folder=folder))  # fmt: skip
        (folder / "ranks-2").mkdir()
        (folder / "ranks-2" / "plan.json").write_text(json.dumps(plan))
        record: dict[str, Any] = {"link": link}
        for ranks in (1, 2):
            muster("train", case.task, *case.flags, "--devices", f"cpu:{ranks}",
                   "--global-batch", str(case.batch), "--max-steps", str(num_steps),
                   "--eval-frequency", "0", "--no-tensorboard", "--quiet",
                   "--run-dir", f"ranks-{ranks}", folder=folder)  # fmt: skip
            compared = json.loads(muster("plan", f"ranks-{ranks}", "--json", folder=folder))
            lines = {line["name"]: line for line in compared["lines"]}
            step = lines["step (median)"]
            record[f"ranks_{ranks}"] = {
                "predicted_ms": step["predicted"] * 1e3,
                "measured_ms": step["measured"] * 1e3,
                "error": step["error"],
                "exposed_predicted_ms": lines["exposed communication"]["predicted"] * 1e3,
                "exposed_measured_ms": lines["exposed communication"]["measured"] * 1e3,
            }
        one, two = record["ranks_1"], record["ranks_2"]
        record["speed_up"] = {
            "predicted": one["predicted_ms"] / two["predicted_ms"],
            "measured": one["measured_ms"] / two["measured_ms"],
        }
        return record


def report(case: Case, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    def over(*path: str) -> list[float]:
        values = []
        for one in rounds:
            value: Any = one
            for key in path:
                value = value[key]
            values.append(float(value))
        return values

    rows = []
    found: dict[str, Any] = {
        "link": {key: summary(over("link", key)) for key in ("latency_us", "bandwidth_gb_s")},
        "speed_up": {key: summary(over("speed_up", key)) for key in ("predicted", "measured")},
    }
    for ranks in ("ranks_1", "ranks_2"):
        found[ranks] = {key: summary(over(ranks, key)) for key in rounds[0][ranks]}
        values = found[ranks]
        rows.append(
            [
                ranks[-1],
                f"{values['predicted_ms']['median']:.2f}",
                f"{values['measured_ms']['median']:.2f}",
                f"{values['error']['median']:+.0%}",
                f"[{values['error']['low']:+.0%}, {values['error']['high']:+.0%}]",
                f"{values['exposed_predicted_ms']['median']:.2f}",
                f"{values['exposed_measured_ms']['median']:.2f}",
            ]
        )
    print(f"\n{case.title}, global batch {case.batch}; {len(rounds)} rounds")
    headers = ["ranks", "predicted, ms", "measured, ms", "error", "range"]
    table([*headers, "waits for gradients, ms: predicted", "measured"], rows)
    speed = found["speed_up"]
    print(
        f"speed-up of 2 ranks: predicted {speed['predicted']['median']:.2f}, "
        f"measured {speed['measured']['median']:.2f}; gloo: "
        f"{found['link']['latency_us']['median']:.0f} µs, "
        f"{found['link']['bandwidth_gb_s']['median']:.2f} GB/s"
    )
    return found


def rate_of(case: Published, utilisation: float) -> float | None:
    """Samples/s of a published training by the plan; None where it does not fit."""
    request = PlanRequest(
        devices=f"{case.card} x{case.num_devices}", global_batch=case.global_batch,
        batch_size=case.batch_size, flops_per_sample=case.flops, work=case.kind,
        precision=case.precision, strategy=case.strategy, network=case.network,
        devices_per_node=case.network and 8, utilisation=utilisation,
    )  # fmt: skip
    what = f"params={case.parameters}"
    known = known_model(what, request)
    assert known is not None
    plan = plan_training(what, known, Settings(), parse_prices(DEFAULT_PRICES, "", "assumed"))
    return plan.predictions[-1].samples_per_s.value if plan.predictions else None


def said(rate: float | None) -> str:
    return "–" if rate is None else f"{rate:,.1f}" if rate < 100 else f"{rate:,.0f}"


def against_published() -> dict[str, Any]:
    rows, record = [], {}
    for case in PUBLISHED:
        others = [one for one in of_kind(case.kind) if one is not case]
        shares = reach(case.kind, case.on, case.precision, others)
        usual, low, high = (rate_of(case, share) for share in shares)
        is_inside = None
        if usual is not None and low is not None and high is not None:
            is_inside = low <= case.samples_per_s <= high
        record[case.name] = {"published": case.samples_per_s, "planned": [low, usual, high]}
        word = {None: "does not fit", True: "inside", False: "OUTSIDE"}[is_inside]
        shown = [said(one) for one in (low, usual, high)]
        devices = f"{case.num_devices} x {case.card}"
        rows.append([case.name, devices, said(case.samples_per_s), *shown, word, case.source])
    heads = ["", "on", "published, samples/s", "planned: least", "usual", "most", "", "source"]
    table(heads, rows, "Published trainings, each planned from the others alone")
    inside = sum(row[6] == "inside" for row in rows)
    goal("published trainings inside of the plan's interval", f"≥ {GOAL_PUBLISHED}",
         f"{inside} of {len(rows)}", inside >= GOAL_PUBLISHED, at_any_size=True)  # fmt: skip
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60, help="per measurement and per run")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", choices=["published", "here"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measure-link", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure_link is not None:
        measure_link(args.measure_link)
        return
    cases = CASES
    if args.quick:
        args.repeats, args.steps, cases = 1, 20, CASES[:1]
    about = machine()
    print(f"{about['processor']}, {about['cores']} cores, {about['date']}")
    record: dict[str, Any] = {"machine": about, "cases": {}}
    if args.only != "here":
        record["published"] = against_published()
    if args.only == "published":
        write_json(args.json, record)
        return
    rounds: dict[str, list[dict[str, Any]]] = {case.title: [] for case in cases}
    for number in range(args.repeats):
        for case in cases:
            one = run_case(case, args.steps)
            rounds[case.title].append(one)
            errors = ", ".join(f"{one[f'ranks_{n}']['error']:+.0%}" for n in (1, 2))
            print(f"  round {number + 1}: {case.title}: {errors}", file=sys.stderr)
    for case in cases:
        record["cases"][case.title] = report(case, rounds[case.title])
    every = [abs(one["ranks_2"]["error"]) for found in rounds.values() for one in found]
    record["error_of_two_ranks"] = summary(every)
    error = statistics.median(every)
    goal("error of a step of two ranks, either way, median", f"≤ {GOAL_ERROR:.0%}",
         f"{error:.0%}", error <= GOAL_ERROR)  # fmt: skip
    write_json(args.json, record)


if __name__ == "__main__":
    main()
