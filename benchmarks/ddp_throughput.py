"""Training two ranks with muster beside a hand-written loop and the peers' trainers.

    python benchmarks/ddp_throughput.py            # about 10 minutes
    python benchmarks/ddp_throughput.py --quick    # muster and the loop, one round

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
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from measuring import goal, machine, summary, table, write_json

PROGRAM = Path(__file__).parent / "programs" / "mlp.py"
_BLOCK = 16
GOAL_OF_ITEMS = 0.97
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
        quiet = {
            "muster-quiet": ["--log-every", "1000000", "--no-tensorboard"],
            "muster-items": ["--items"],
        }.get(peer, [])
        return [
            *(sys.executable, "-m", "muster", "train", f"{PROGRAM}:Mlp"),
            *("--devices", f"cpu:{case.ranks}", "--batch-size", str(case.batch)),
            *("--max-steps", str(case.steps), "--epochs", "1000000", "--schedule", "constant"),
            *("--eval-frequency", "0", "--run-dir", str(folder / "run"), "--quiet"),
            *("--clock-steps", str(case.steps), *shape, *quiet),
        ]
    program = [str(PROGRAM), peer, "--steps", str(case.steps), "--batch", str(case.batch), *shape]
    if case.ranks == 1:
        return [sys.executable, *program]
    launcher = ["-m", "torch.distributed.run", "--standalone"]
    return [sys.executable, *launcher, "--nproc-per-node", str(case.ranks), *program]


def measure(peer: str, case: Case) -> Found:
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as name:
        folder = Path(name)
        begin = time.time()
        done = subprocess.run(
            command_for(peer, case, folder),
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise SystemExit(f"{peer} failed:\n{done.stderr[-3000:]}")
        times = json.loads((folder / "clock.json").read_text())
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


def goal_of_items(what: str, found: dict[str, Any]) -> None:
    """CPU seconds decide: other programs on the machine change them least."""
    if "muster-items" not in found:
        return
    share = 1 / found["muster-items"]["cpu_of_raw"]["median"]
    goal(f"{what}, items one by one, of the raw loop (CPU)", f"≥ {GOAL_OF_ITEMS}", f"{share:.3f}",
         share >= GOAL_OF_ITEMS)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200, help="of the first case")
    parser.add_argument("--tiny-steps", type=int, default=6000)
    parser.add_argument("--only", choices=["ddp", "tiny"])
    parser.add_argument("--peers", nargs="+", choices=list(NAMES), default=list(NAMES))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.quick:
        args.repeats, args.steps, args.tiny_steps = 1, 40, 500
        args.peers = ["raw", "muster", "muster-items"]
    peers = ["raw", *(peer for peer in args.peers if peer != "raw")]
    ddp = Case("2 ranks, 784-512-512-10, 128 per rank", 2, 128, 784, 512, 12_800, args.steps, 10)
    tiny = Case("1 process, 16-32-32-10, batch 32", 1, 32, 16, 32, 32_000, args.tiny_steps, 100)
    about = machine("accelerate", "lightning", "transformers")
    print(f"{about['processor']}, {about['cores']} cores, {about['date']}")
    record: dict[str, Any] = {"machine": about}
    if args.only != "tiny":
        found = report(ddp, run_case(ddp, peers, args.repeats))
        record["ddp"] = found
        if "muster" in found:
            share = found["muster"]["of_raw"]["median"]
            goal("two ranks, of the raw loop", "≥ 0.98", f"{share:.3f}", share >= 0.98)
        goal_of_items("two ranks", found)
    if args.only != "ddp":
        found = report(tiny, run_case(tiny, peers, args.repeats))
        record["tiny"] = found
        if "muster" in found:
            share = found["muster"]["of_raw"]["median"]
            goal("a tiny model, of the raw loop", "≥ 0.97", f"{share:.3f}", share >= 0.97)
        goal_of_items("a tiny model", found)
    write_json(args.json, record)


if __name__ == "__main__":
    main()
