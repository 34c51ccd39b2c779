"""Training two ranks with muster beside a hand-written loop and the peers' trainers.

    python benchmarks/ddp_throughput.py            # about 10 minutes
    python benchmarks/ddp_throughput.py --only turns   # a minute or two: the goals alone
    python benchmarks/ddp_throughput.py --quick        # the same, shorter

First a 784-512-512-10 network, 128 samples per rank, gloo, one thread per rank; then a tiny one in
one process, where all that is left is what a step costs besides torch. Everyone has the same model,
TensorDataset, collate, AdamW, and no loader processes. muster writes a line of metrics at every
step, which is its default (and TensorBoard); the peers' loggers are off, and the raw loop reads no
loss. muster takes a batch of a plain TensorDataset at once, where the loader of the others fetches
its samples one by one; "item by item" is muster without that. "raw, logging" is the same loop with
``loss.item()`` and one JSON line per step.

Ratios are taken within a round, in which all run one after the other, and their median is shown.
samples/s are those of the steady part. "typical" is the median over blocks of 16 steps: pauses
of the machine (and what a trainer does once a second) hardly enter; "CPU" is what rank 0 used in
all its threads, which other programs on the machine change least.

The goals are judged by turns in one process: some steps of muster's, then as many of the raw loop,
and so on, and the median ratio of neighbours. Between starts of processes, which take most of the
time of the tables, a busy machine changes by more than what is measured. "Its own AdamW" is muster
with the optimizer that it makes where a task makes none: one pass over all parameters.
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
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from measuring import goal, installed, interval, machine, summary, table, write_json

PROGRAM = Path(__file__).parent / "programs" / "mlp.py"
_BLOCK = 16
GOAL = 0.97
#: What takes turns with the raw loop in one process.
TURNS = {
    "muster": [],
    "muster, items one by one": ["--items"],
    "muster, items one by one, its own AdamW": ["--items", "--own-optimizer"],
}
NAMES = {
    "raw": "raw loop",
    "raw-log": "raw loop, logging",
    "muster": "muster",
    "muster-items": "muster, item by item",
    "muster-quiet": "muster, no metrics",
    "accelerate": "Accelerate",
    "fabric": "Lightning Fabric",
    "lightning": "Lightning Trainer",
    "hf": "HF Trainer",
}


PACKAGES = {
    "accelerate": "accelerate", "fabric": "lightning", "lightning": "lightning",
    "hf": "transformers",
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    title: str
    ranks: int
    batch: int
    inputs: int
    hidden: int
    samples: int
    steps: int
    warmup: int
    turn: int


@dataclass(frozen=True)
class Found:
    """``rate``: samples/s; ``typical_s``: of a step, the median of blocks; ``cpu_s``: CPU time of
    rank 0 per step, of all its threads; ``first_s``: from the command to the first step.
    """

    rate: float
    typical_s: float
    cpu_s: float
    first_s: float


def command_for(peer: str, case: Case, folder: Path) -> list[str]:
    clock = str(folder / "clock.json")
    shape = ["--inputs", str(case.inputs), "--hidden", str(case.hidden)]
    shape += ["--samples", str(case.samples), "--clock", clock]
    if peer.startswith("muster"):
        more = {
            "muster-quiet": ["--log-every", "1000000", "--no-tensorboard"],
            "muster-items": ["--items"],
        }.get(peer, [])
        return of_muster(case, folder, more)
    program = [str(PROGRAM), peer, "--steps", str(case.steps), "--batch", str(case.batch), *shape]
    if case.ranks == 1:
        return [sys.executable, *program]
    launcher = ["-m", "torch.distributed.run", "--standalone"]
    return [sys.executable, *launcher, "--nproc-per-node", str(case.ranks), *program]


def of_muster(case: Case, folder: Path, more: list[str]) -> list[str]:
    return [
        *(sys.executable, "-m", "muster", "train", f"{PROGRAM}:Mlp"),
        *("--devices", f"cpu:{case.ranks}", "--batch-size", str(case.batch)),
        *("--max-steps", str(case.steps), "--epochs", "1000000", "--schedule", "constant"),
        *("--eval-frequency", "0", "--run-dir", str(folder / "run"), "--quiet"),
        *("--inputs", str(case.inputs), "--hidden", str(case.hidden)),
        *("--samples", str(case.samples), "--clock", str(folder / "clock.json")),
        *("--clock-steps", str(case.steps), *more),
    ]


def clocked(name: str, command: list[str], folder: Path) -> Any:
    """What the program has written to its clock."""
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"{name} failed:\n{done.stderr[-3000:]}")
    return json.loads((folder / "clock.json").read_text())


def take_turns(case: Case, names: list[str]) -> dict[str, Any]:
    """Each of ``names`` and the raw loop in one process; which share of the loop's rate it has."""
    record, rows = {}, []
    for name in names:
        with tempfile.TemporaryDirectory(prefix="muster-bench-") as place:
            folder = Path(place)
            more = ["--beside", str(case.turn), "--clock-batch", str(case.batch), *TURNS[name]]
            pairs = clocked(name, of_muster(case, folder, more), folder)
        shares = [raw / own for own, _, raw, _ in pairs]
        low, high = interval(shares)
        median = statistics.median(shares)
        own_us, _, raw_us, _ = (
            1e6 * statistics.median(column) for column in zip(*pairs, strict=True)
        )
        wall = statistics.median(raw / own for _, own, _, raw in pairs)
        record[name] = {"of_raw": {"median": median, "low": low, "high": high}, "wall": wall,
                        "pairs": len(pairs), "cpu_us": own_us, "raw_cpu_us": raw_us}  # fmt: skip
        rows.append([name, f"{own_us:,.0f}", f"{raw_us:,.0f}", f"{median:.3f}",
                     f"[{low:.3f}–{high:.3f}]", f"{wall:.3f}", str(len(pairs))])  # fmt: skip
    heads = [
        "",
        "CPU per step, µs",
        "raw loop's",
        "of raw",
        "median's 95 %",
        "by wall time",
        "turns",
    ]
    table(heads, rows, f"{case.title}; turns of {case.turn} steps")
    return record


def measure(peer: str, case: Case) -> Found:
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as name:
        folder = Path(name)
        begin = time.time()
        times = clocked(peer, command_for(peer, case, folder), folder)
    steady = times[case.warmup :]
    (first, first_cpu), (last, last_cpu) = steady[0], steady[-1]
    count = len(steady) - 1
    # Over several steps at a time: some fetch a few batches in a row, then none for a while.
    starts = [at for at, _ in steady[::_BLOCK]]
    lengths = [(after - before) / _BLOCK for before, after in pairwise(starts)]
    return Found(
        rate=count * case.batch * case.ranks / (last - first),
        typical_s=statistics.median(lengths),
        cpu_s=(last_cpu - first_cpu) / count,
        first_s=times[0][0] - begin,
    )


def run_case(case: Case, peers: list[str], repeats: int) -> dict[str, list[Found]]:
    found: dict[str, list[Found]] = {peer: [] for peer in peers}
    for round_number in range(repeats):
        # Every other round backwards: whoever always comes after a certain other is not favoured.
        for peer in peers if round_number % 2 == 0 else reversed(peers):
            one = measure(peer, case)
            found[peer].append(one)
            print(
                f"  round {round_number + 1}: {peer}: {one.rate:,.0f} samples/s, "
                f"{one.typical_s * 1e6:,.0f} µs, CPU {one.cpu_s * 1e6:,.0f} µs, "
                f"first step after {one.first_s:.1f} s",
                file=sys.stderr,
            )
    return found


def report(case: Case, found: dict[str, list[Found]]) -> dict[str, Any]:
    raw = found["raw"]
    record: dict[str, Any] = {}
    for peer, values in found.items():
        pairs = list(zip(values, raw, strict=True))
        record[peer] = {
            "samples_per_s": summary([v.rate for v in values]),
            "of_raw": summary([v.rate / r.rate for v, r in pairs]),
            "typical_us": summary([v.typical_s * 1e6 for v in values]),
            "typical_of_raw": summary([r.typical_s / v.typical_s for v, r in pairs]),
            "cpu_us": summary([v.cpu_s * 1e6 for v in values]),
            "cpu_of_raw": summary([v.cpu_s / r.cpu_s for v, r in pairs]),
            "first_step_s": summary([v.first_s for v in values]),
        }
    print(f"\n{case.title}; {len(raw)} rounds of {case.steps} steps")
    headers = ["", "samples/s", "of raw", "range", "typical step, µs", "of raw"]
    headers += ["CPU per step, µs", "× raw", "range", "first step, s"]
    rows = [
        [
            NAMES[peer],
            f"{r['samples_per_s']['median']:,.0f}",
            f"{r['of_raw']['median']:.3f}",
            f"[{r['of_raw']['low']:.3f}–{r['of_raw']['high']:.3f}]",
            f"{r['typical_us']['median']:,.0f}",
            f"{r['typical_of_raw']['median']:.3f}",
            f"{r['cpu_us']['median']:,.0f}",
            f"{r['cpu_of_raw']['median']:.3f}",
            f"[{r['cpu_of_raw']['low']:.3f}–{r['cpu_of_raw']['high']:.3f}]",
            f"{r['first_step_s']['median']:.2f}",
        ]
        for peer, r in record.items()
    ]
    table(headers, rows)
    return record


def judge(what: str, found: dict[str, Any]) -> None:
    """CPU seconds decide: other programs on the machine change them least."""
    for name, values in found.items():
        share = values["of_raw"]["median"]
        low, high = (values["of_raw"][name] for name in ("low", "high"))
        goal(f"{what}, {name}, of the raw loop (CPU)", f"≥ {GOAL}",
             f"{share:.3f} [{low:.3f}, {high:.3f}]", share >= GOAL)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200, help="of the first case")
    parser.add_argument("--tiny-steps", type=int, default=6000)
    parser.add_argument("--turns", type=int, default=100, help="in one process")
    parser.add_argument("--only", nargs="+", choices=["ddp", "tiny", "turns"])
    parser.add_argument("--peers", nargs="+", choices=list(NAMES), default=list(NAMES))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.quick:
        args.only, args.turns = ["turns"], 10
    names = [*TURNS][1:2] if args.quick else [*TURNS]  # each starts ranks, which takes longest
    peers = installed(["raw", *(peer for peer in args.peers if peer != "raw")], PACKAGES)
    ddp = Case("2 ranks, 784-512-512-10, 128 per rank", 2, 128, 784, 512, 12_800, args.steps, 10, 4)
    tiny = Case("1 process, 16-32-32-10, batch 32", 1, 32, 16, 32, 32_000, args.tiny_steps, 100, 20)
    about = machine("accelerate", "lightning", "transformers")
    print(f"{about['processor']}, {about['cores']} cores, {about['date']}")
    record: dict[str, Any] = {"machine": about}
    for what, case in (("two ranks", ddp), ("a tiny model", tiny)):
        if args.only is None or "turns" in args.only:
            # The first turn is nobody's: it is left out there.
            record[what] = take_turns(replace(case, steps=(args.turns + 1) * case.turn), names)
            judge(what, record[what])
    if args.only is None or "ddp" in args.only:
        record["ddp"] = report(ddp, run_case(ddp, peers, args.repeats))
    if args.only is None or "tiny" in args.only:
        record["tiny"] = report(tiny, run_case(tiny, peers, args.repeats))
    write_json(args.json, record)


if __name__ == "__main__":
    main()
