"""Steps about training one model on the card: exact, fast, and saved at little cost."""

from __future__ import annotations

import importlib.util
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from acceptance.here import Here

_TASKS = "acceptance.programs.tasks"


def exact(here: Here) -> None:
    """float64 as on the CPU, micro-batches halved without a trace, resumed bit by bit."""
    here.pytest("test_training_gpu.py", "-k", "float64 or memory or bf16")
    whole = _curve(here, "whole")
    _curve(here, "again", env={"STOP_AT": "21"}, code=75)
    again = _curve(here, "again")
    here.expect("losses, stopped and not", len(whole), again == whole, "the same bits")


def _curve(
    here: Here, run: str, env: Mapping[str, str] | None = None, code: int = 0
) -> list[float]:
    """The losses of a training; with STOP_AT a rank is told to end at that step."""
    here.muster(
        "train", f"{_TASKS}:Curve", "--devices", here.devices, "--deterministic", "--batch-size",
        "16", "--max-steps", str(here.size(60, 30)), "--epochs", "99", "--eval-frequency", "0",
        "--no-tensorboard", "--quiet", "--run-dir", run, env=env, code=code,
    )  # fmt: skip
    lines = map(json.loads, (here.folder / run / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if line["kind"] == "train"]


#: Of a contest: batch, steps before the first round, and of each of the rounds.
_SIZES = {"Gpt": (8, 10, 30), "Mlp": (256, 200, 1000)}
_SMALL = (32, 2, 4)
_ROUNDS, _SETTLE = 5, 3


def speed(here: Here) -> None:
    """Muster beside a loop by hand, Accelerate and Lightning: the same model, optimizer, precision.

    All of them stay on the card and train a number of steps in turns, so that whatever changes
    with time changes for all. Compared are the medians of the rounds.
    """
    for name, goal in (
        ("Gpt", "bf16 GPT of 124 M, share of the raw loop"),
        ("Mlp", "small MLP, share of the raw loop"),
    ):
        if here.rehearse and name == "Gpt":
            continue
        batch, _, steps = _SMALL if here.rehearse else _SIZES[name]
        seconds = _contest(here, name)
        base = statistics.median(seconds["raw"])
        for way, found in seconds.items():
            middle = statistics.median(found)
            here.note(f"{name} by {way}, samples/s", batch * steps / middle)
            here.note(f"{name} by {way}, spread of the rounds", (max(found) - min(found)) / middle)
            here.note(f"{name} by {way}, share of the raw loop", base / middle)
        here.goal(goal, base / statistics.median(seconds["muster"]))


def _contest(here: Here, name: str) -> dict[str, list[float]]:
    """The seconds of each round of all ways; muster begins alone, for it takes a free card only."""
    ways = ["muster", "raw"]
    for peer in ("accelerate", "lightning"):
        if importlib.util.find_spec(peer) is None:
            here.note(f"{name} by {peer}", "not installed")
        else:
            ways.append(peer)
    batch, warm, steps = _SMALL if here.rehearse else _SIZES[name]
    count = warm + _ROUNDS * (_SETTLE + steps) + 1
    turns = here.folder / f"turns-{name}"
    turns.mkdir()
    running: dict[str, subprocess.Popen[bytes]] = {}
    for way in ways:
        words = [sys.executable, "-m", "acceptance.programs.peers", way, name]
        words += [str(batch), str(count), here.device]
        command = _command(here, name, batch, count) if way == "muster" else words
        env = {"TURNS": str(turns), "WAY": way, "CLOCK": str(turns / f"{way}.json"),
               "WARM": str(warm), "STEPS": str(steps), "SETTLE": str(_SETTLE),
               "ROUNDS": str(_ROUNDS)}  # fmt: skip
        running[way] = subprocess.Popen(
            command, cwd=here.folder, env=here.environment(env), stdin=subprocess.DEVNULL
        )
        if way == "muster":
            _wait_for(turns / "muster-ready", running[way])
    try:
        return _rounds(here, name, turns, running)
    finally:
        for process in running.values():
            process.kill()


def _rounds(
    here: Here, name: str, turns: Path, running: Mapping[str, subprocess.Popen[bytes]]
) -> dict[str, list[float]]:
    in_turns = list(running)

    def wait_for(way: str, path: Path, size: int = 0) -> None:
        """A peer that cannot train here costs its own row, and not those of the others."""
        try:
            _wait_for(path, running[way], size=size)
        except RuntimeError:
            if way in ("muster", "raw"):
                raise
            in_turns.remove(way)
            code = running[way].returncode
            here.expect(f"{name} by {way}, exit code", code, not here.rehearse, "0")

    for way in running:
        wait_for(way, turns / f"{way}-ready")
    for number in range(_ROUNDS):
        for way in in_turns[:: 1 if number % 2 == 0 else -1]:
            (turns / f"{way}-{number}").touch()
            wait_for(way, turns / f"{way}.json", number + 1)
    for way in in_turns:
        code = running[way].wait()
        here.expect(f"{name} by {way}, exit code", code, code == 0, "0")
    return {way: json.loads((turns / f"{way}.json").read_text()) for way in in_turns}


def _wait_for(path: Path, process: subprocess.Popen[bytes], *, size: int = 0) -> None:
    """Until ``path`` is there, with ``size`` times in it, and its program goes on."""
    while not path.exists() or (size and len(json.loads(path.read_text())) < size):
        if process.poll():
            raise RuntimeError(f"{' '.join(map(str, process.args))} ended before {path.name}")
        time.sleep(0.005)


def _command(here: Here, name: str, batch: int, count: int, *more: str, run: str = "") -> list[str]:
    return [
        sys.executable, "-m", "muster", "train", f"{_TASKS}:{name}", "--devices", here.devices,
        "--batch-size", str(batch), "--max-steps", str(count), "--epochs", "1000000",
        "--lr", "1e-4", "--schedule", "constant",
        "--precision", "bf16" if here.device == "cuda" else "fp32",
        "--eval-frequency", "0", "--no-tensorboard", "--run-dir", run or f"run-{name}",
        *(["--small"] if here.rehearse else []), *(more or ("--checkpoint-interval", "1h")),
    ]  # fmt: skip


def saving(here: Here) -> None:
    """What a checkpoint every fifty steps costs, beside a plain copy of the same bytes."""
    import torch

    every = here.size(50, 5)
    saved, found = _alone(here, "saved", "--checkpoint-interval", f"{every}steps")
    # A rehearsal judges no time, and step 5 trains without saving.
    plain, found = (saved, found) if here.rehearse else _alone(here, "plain")
    said, batch = found["measured"]["samples_per_s"], here.size(16, 4)
    here.fast("samples/s as reported and as they are", said * plain / batch, at_most=1.01)
    here.note("MFU", found["measured"].get("mfu"))
    here.goal("share of time that saving takes", saved / plain - 1)
    here.note("checkpoints", len(list((here.folder / "saved/checkpoints").glob("step-*"))))
    num_bytes = here.size(1_500_000_000, 1_000_000)
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=here.device)
    target = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=here.device == "cuda")
    copy = here.seconds(lambda: target.copy_(source, non_blocking=True))
    here.note("s to copy 1.5 GB to pinned memory", copy)
    here.note("measured", {k: v for k, v in found["measured"].items() if isinstance(v, float)})


def _alone(here: Here, run: str, *more: str) -> tuple[float, dict[str, Any]]:
    """The median time of a step over rounds of fifty, and the results of the run."""
    batch, warm, steps = here.size(16, 4), here.size(10, 2), here.size(50, 5)
    clock = here.folder / f"{run}.json"
    env = {"CLOCK": str(clock), "WARM": str(warm), "STEPS": str(steps), "ROUNDS": str(_ROUNDS)}
    count = warm + _ROUNDS * steps + 1
    here.run(_command(here, "Gpt", batch, count, *more, run=run), env=env)
    found = json.loads(clock.read_text())
    middle = statistics.median(found)
    here.note(f"{run}, s of {steps} steps", found)
    here.note(f"{run}, spread of the rounds", (max(found) - min(found)) / middle)
    return middle / steps, json.loads((here.folder / run / "training_results.json").read_text())
