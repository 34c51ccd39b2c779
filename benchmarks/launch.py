"""From the command to the first all-reduce of all ranks: muster beside torchrun.

    python benchmarks/launch.py            # 2 and 8 ranks, 7 rounds: about 6 minutes
    python benchmarks/launch.py --quick

The same script (import torch, join a gloo group, add one number) under each launcher; the time is
that of the rank that was last. ``import torch`` alone, in a bare interpreter, is the yardstick: no
launcher whose ranks import torch themselves can be faster. ``muster train`` runs a tiny network
until its first optimizer step, with all of its checks before it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from measuring import goal, machine, summary, table, write_json

PROGRAMS = Path(__file__).parent / "programs"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def call(command: list[str], folder: Path) -> float:
    """Run a command to its end; returns when it began."""
    begin = time.time()
    done = subprocess.run(
        command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return begin


def import_torch() -> float:
    begin = call([sys.executable, "-c", "import torch"], Path.cwd())
    return time.time() - begin


def first_all_reduce(launcher: list[str]) -> float:
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as name:
        folder = Path(name)
        marks = folder / "marks"
        marks.mkdir()
        program = [str(PROGRAMS / "first_all_reduce.py"), str(marks)]
        begin = call([sys.executable, *launcher, *program], folder)
        return max(float(mark.read_text()) for mark in marks.iterdir()) - begin


def first_step(ranks: int) -> float:
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as name:
        folder = Path(name)
        clock = folder / "clock.json"
        shape = ["--inputs", "16", "--hidden", "32", "--samples", "1000", "--clock-steps", "1"]
        command = ["-m", "muster", "train", f"{PROGRAMS / 'mlp.py'}:Mlp", "--devices"]
        command += [f"cpu:{ranks}", "--max-steps", "1", "--batch-size", "8", "--quiet", *shape]
        begin = call([sys.executable, *command, "--clock", str(clock)], folder)
        return float(json.loads(clock.read_text())[0][0]) - begin


def contenders(ranks: int) -> dict[str, Callable[[], float]]:
    run = ["-m", "muster", "run", "--quiet", "--devices", f"cpu:{ranks}"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return {
        f"muster run, fork, {ranks} ranks": partial(first_all_reduce, [*run, "--start", "fork"]),
        f"muster run, exec, {ranks} ranks": partial(first_all_reduce, [*run, "--start", "exec"]),
        f"torchrun, {ranks} ranks": partial(first_all_reduce, torchrun),
        f"muster train, {ranks} ranks, first step": partial(first_step, ranks),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.quick:
        args.ranks, args.repeats = [2], 1
    all_of_them: dict[str, Callable[[], float]] = {"import torch": import_torch}
    for ranks in args.ranks:
        all_of_them |= contenders(ranks)
    import_torch()  # the files are in the page cache from here on
    figures: dict[str, list[float]] = {name: [] for name in all_of_them}
    for round_number in range(args.repeats):
        for name, run in all_of_them.items():
            figures[name].append(run())
            print(f"  round {round_number + 1}: {name}: {figures[name][-1]:.2f} s", file=sys.stderr)
    yardstick = figures["import torch"]
    found = {
        name: {
            "seconds": summary(values),
            "imports": summary([v / y for v, y in zip(values, yardstick, strict=True)]),
        }
        for name, values in figures.items()
    }
    about = machine()
    print(f"{about['processor']}, {about['cores']} cores, {about['date']}; {args.repeats} rounds")
    rows = [
        [
            name,
            f"{s['seconds']['median']:.2f}",
            f"[{s['seconds']['low']:.2f}–{s['seconds']['high']:.2f}]",
            f"{s['imports']['median']:.2f}",
            f"[{s['imports']['low']:.2f}–{s['imports']['high']:.2f}]",
        ]
        for name, s in found.items()
    ]
    table(["command to first all-reduce", "s", "range", "imports of torch", "range"], rows)
    most = max(args.ranks)
    share = found[f"muster run, fork, {most} ranks"]["imports"]["median"]
    goal(f"{most} ranks begin, imports of torch", "≤ 1.5", f"{share:.2f}", share <= 1.5)
    write_json(args.json, {"machine": about, "found": found})


if __name__ == "__main__":
    main()
