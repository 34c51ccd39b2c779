"""Samples per second on 1 to N ranks with ``muster train``, and what goes into communication.

    python benchmarks/scaling.py --figure scaling.png       # as many ranks as there are cores
    python benchmarks/scaling.py --quick

The 784-512-512-10 network of ``ddp_throughput.py``. *Strong*: a global batch of 256 is shared by
the ranks; *weak*: every rank has 128 samples. One thread per rank, gloo on the CPU (``--devices``
takes GPUs: ``--devices gpu --ranks 1 2 4 8``). Efficiency is the rate divided by ranks times the
rate of one rank in the same round. Communication is the share of a step from the start of its last
all-reduce to the end of the backward, as muster measures it on every run.

Ranks on one machine share its caches and memory: efficiency below 1 is not communication alone.
More ranks than cores cannot be faster, and are marked.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from measuring import machine, summary, table, write_json

PROGRAM = Path(__file__).parent / "programs" / "mlp.py"


@dataclass(frozen=True)
class Found:
    rate: float
    communication: float
    data_wait: float


def measure(kind: str, ranks: int, args: argparse.Namespace) -> Found:
    batch = args.batch * (2 if kind == "strong" else ranks)
    devices = f"cpu:{ranks}" if args.devices == "cpu" else str(ranks)
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as name:
        command = [
            *(sys.executable, "-m", "muster", "train", f"{PROGRAM}:Mlp", "--quiet"),
            *("--devices", devices, "--global-batch", str(batch), "--precision", "fp32"),
            *("--max-steps", str(args.steps), "--epochs", "1000000", "--eval-frequency", "0"),
            *("--schedule", "constant", "--hidden", str(args.hidden), "--run-dir", f"{name}/run"),
        ]
        done = subprocess.run(
            command,
            cwd=name,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise SystemExit(f"{ranks} ranks failed:\n{done.stderr[-3000:]}")
        measured = json.loads(Path(name, "run", "training_results.json").read_text())["measured"]
    return Found(
        measured["samples_per_s"],
        measured["communication_share"] or 0.0,
        measured["data_wait_share"] or 0.0,
    )


def draw(path: Path, record: dict[str, Any], title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for kind, rows in record.items():
        ranks = [row["ranks"] for row in rows]
        rates = [row["samples_per_s"] for row in rows]
        middle = [r["median"] for r in rates]
        spread = [[r["median"] - r["low"] for r in rates], [r["high"] - r["median"] for r in rates]]
        lines = left.errorbar(ranks, middle, yerr=spread, marker="o", capsize=3, label=kind)
        colour = lines[0].get_color()
        ideal = [middle[0] * count / ranks[0] for count in ranks]
        left.plot(ranks, ideal, linestyle=":", color=colour, label=f"{kind}, ideal")
        efficiency = [row["efficiency"]["median"] for row in rows]
        right.plot(ranks, efficiency, marker="o", color=colour, label=f"{kind}, efficiency")
        shares = [row["communication"]["median"] for row in rows]
        right.plot(ranks, shares, marker="x", linestyle="--", color=colour,
                   label=f"{kind}, time in communication")  # fmt: skip
    for axes, label in ((left, "samples/s"), (right, "share")):
        axes.set(xlabel="ranks", ylabel=label, xticks=ranks)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.suptitle(title)
    figure.savefig(path, dpi=150)


def main() -> None:
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=list(range(1, cores + 1)))
    parser.add_argument("--devices", choices=["cpu", "gpu"], default="cpu")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    kinds = ["strong", "weak"]
    if args.quick:
        args.ranks, args.steps, args.repeats, kinds = args.ranks[:2], 20, 1, ["weak"]
    figure = args.figure or (args.json.with_suffix(".png") if args.json else None)
    found: dict[tuple[str, int], list[Found]] = {}
    for round_number in range(args.repeats):
        for kind in kinds:
            for ranks in args.ranks:
                one = measure(kind, ranks, args)
                found.setdefault((kind, ranks), []).append(one)
                print(f"  round {round_number + 1}: {kind}, {ranks} ranks: {one}", file=sys.stderr)
    record: dict[str, Any] = {kind: [] for kind in kinds}
    rows = []
    for (kind, ranks), values in found.items():
        ones = found[kind, args.ranks[0]]
        line = {
            "ranks": ranks,
            "samples_per_s": summary([v.rate for v in values]),
            "efficiency": summary(
                [
                    v.rate / one.rate * args.ranks[0] / ranks
                    for v, one in zip(values, ones, strict=True)
                ]
            ),
            "communication": summary([v.communication for v in values]),
            "data_wait": summary([v.data_wait for v in values]),
        }
        record[kind].append(line)
        crowded = " (more than cores)" if args.devices == "cpu" and ranks > cores else ""
        rows.append(
            [
                f"{kind}, {ranks} rank{'s' * (ranks > 1)}{crowded}",
                f"{line['samples_per_s']['median']:,.0f}",
                f"[{line['samples_per_s']['low']:,.0f}–{line['samples_per_s']['high']:,.0f}]",
                f"{line['efficiency']['median']:.2f}",
                f"[{line['efficiency']['low']:.2f}–{line['efficiency']['high']:.2f}]",
                f"{line['communication']['median']:.0%}",
                f"{line['data_wait']['median']:.0%}",
            ]
        )
    about = machine()
    print(f"{about['processor']}, {cores} cores, {about['date']}; {args.repeats} rounds")
    table(["", "samples/s", "range", "efficiency", "range", "communication", "data"], rows)
    if figure is not None:
        draw(figure, record, f"muster train, {about['processor']}, {cores} cores")
        print(f"figure: {figure}")
    write_json(args.json, {"machine": about, "found": record})


if __name__ == "__main__":
    main()
