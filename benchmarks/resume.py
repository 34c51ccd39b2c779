"""Killed with -9 in the middle of an epoch and started again: is the training still the same one?

    python benchmarks/resume.py            # about 3 minutes
    python benchmarks/resume.py --quick

Three epochs of 40 batches with shuffling, dropout and random augmentation, saved every 10 steps and
killed in the forward of step 73, in the second epoch; muster, Lightning's Trainer and Accelerate,
each as its documentation says. What counts for the killed run are the batches up to the checkpoint
that was gone on from, and those after it. Shown is how many of the second epoch's samples that run
trained on exactly once, whether its batches are those of a run that nobody killed, in the same
order, and whether its final weights are the same bits.

Then how long muster takes from the call to the first batch when it goes on at 10, 50 and 90 % of
an epoch of a million items (torch and muster imported before), with a fresh start beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from measuring import goal, installed, machine, summary, table, write_json

PROGRAMS = Path(__file__).parent / "programs"
NAMES = {"muster": "muster", "lightning": "Lightning Trainer", "accelerate": "Accelerate"}
KILL_AFTER, STEPS_PER_EPOCH, SAMPLES = 73, 40, 1280
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def start(peer: str, folder: Path, note: Path, kill_after: int) -> int:
    program = str(PROGRAMS / "augmented.py")
    if peer == "muster":
        command = [
            *("-m", "muster", "train", f"{program}:Augmented", "--devices", "cpu:1", "--quiet"),
            *("--epochs", "3", "--global-batch", "32", "--schedule", "constant"),
            *("--checkpoint-interval", "10steps", "--max-restarts", "0"),
            *("--run-dir", str(folder / "run")),
        ]
    else:
        command = [program, peer, str(folder)]
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**ENVIRONMENT, "NOTE": str(note), "KILL_AFTER": str(kill_after)},
        capture_output=True,
        text=True,
        check=False,
    )
    if kill_after == 0 and done.returncode != 0:
        raise SystemExit(f"{peer} failed:\n{done.stderr[-3000:]}")
    if kill_after and peer != "muster" and done.returncode != -signal.SIGKILL:
        raise SystemExit(f"{peer} was not killed but ended:\n{done.stderr[-3000:]}")
    return done.returncode


def read(note: Path) -> tuple[list[list[int]], str]:
    lines = [json.loads(line) for line in note.read_text().splitlines()]
    batches = [line["batch"] for line in lines if "batch" in line]
    # The last: muster calls `finish` once before the training, to see that it works.
    digests = [line["digest"] for line in lines if "digest" in line]
    return batches, digests[-1] if digests else ""


def try_out(peer: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as name:
        folder = Path(name)
        for part in ("whole", "killed"):
            (folder / part).mkdir()
        start(peer, folder / "whole", folder / "whole.jsonl", 0)
        start(peer, folder / "killed", folder / "first.jsonl", KILL_AFTER)
        start(peer, folder / "killed", folder / "second.jsonl", 0)
        wanted, wanted_digest = read(folder / "whole.jsonl")
        first, _ = read(folder / "first.jsonl")
        second, digest = read(folder / "second.jsonl")
    # The killed run goes on from a checkpoint: what came after it was undone.
    kept = max(0, len(wanted) - len(second))
    batches = first[:kept] + second
    epoch = batches[STEPS_PER_EPOCH : 2 * STEPS_PER_EPOCH]
    times = Counter(index for batch in epoch for index in batch)
    return {
        "went_on_from_step": kept,
        "once": sum(1 for count in times.values() if count == 1) / SAMPLES,
        "never": 1 - len(times) / SAMPLES,
        "same_batches": sum(a == b for a, b in zip(batches, wanted, strict=False)),
        "batches": len(wanted),
        "is_same_order": batches == wanted,
        "is_same_weights": digest == wanted_digest,
    }


def time_to_first_batch(share: float) -> float:
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as name:
        until = round(1000 * share)
        command = [sys.executable, str(PROGRAMS / "million.py"), name, "--until", str(until)]
        for probe in [["--probe"]] if until == 0 else [[], ["--probe"]]:
            done = subprocess.run(
                [*command, *probe], env=ENVIRONMENT, capture_output=True, text=True, check=False
            )
            if done.returncode != 0:
                raise SystemExit(done.stderr[-3000:])
        return float(json.loads(done.stdout.splitlines()[-1])["first_batch_s"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", nargs="+", choices=list(NAMES), default=list(NAMES))
    parser.add_argument("--shares", type=float, nargs="+", default=[0.0, 0.1, 0.5, 0.9])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.quick:
        args.peers, args.shares, args.repeats = ["muster"], [0.1, 0.9], 1
    about = machine("accelerate", "lightning")
    print(f"{about['processor']}, {about['cores']} cores, {about['date']}")
    found: dict[str, dict[str, Any]] = {}
    for peer in installed(args.peers, {"lightning": "lightning", "accelerate": "accelerate"}):
        found[peer] = try_out(peer)
        print(f"  {peer}: {found[peer]}", file=sys.stderr)
    rows = [
        [
            NAMES[peer],
            str(r["went_on_from_step"]),
            f"{r['once']:.1%}",
            f"{r['never']:.1%}",
            f"{r['same_batches']} of {r['batches']}",
            "yes" if r["is_same_weights"] else "no",
        ]
        for peer, r in found.items()
    ]
    headers = ["killed in step 73", "went on from step", "seen once", "never seen"]
    table([*headers, "batches as undisturbed", "weights bit-identical"], rows)
    if "muster" in found:
        own = found["muster"]
        is_held = own["once"] == 1.0 and own["is_same_order"] and own["is_same_weights"]
        goal("killed and resumed, the same training", "yes", "yes" if is_held else "no", is_held,
             at_any_size=True)  # fmt: skip
    times: dict[float, list[float]] = {share: [] for share in args.shares}
    for round_number in range(args.repeats):
        for share in args.shares:
            times[share].append(time_to_first_batch(share))
            print(f"  round {round_number + 1}: {share:.0%}: {times[share][-1]:.3f} s",
                  file=sys.stderr)  # fmt: skip
    spans = {f"{share:.0%}": summary(values) for share, values in times.items()}
    print("\nmuster, from the call to the first batch of a million items")
    rows = [
        ["a fresh start" if share == "0%" else f"going on at {share}", f"{s['median'] * 1e3:.0f}",
         f"[{s['low'] * 1e3:.0f}–{s['high'] * 1e3:.0f}]"]
        for share, s in spans.items()
    ]  # fmt: skip
    table(["", "ms", "range"], rows)
    write_json(args.json, {"machine": about, "found": found, "first_batch_s": spans})


if __name__ == "__main__":
    main()
