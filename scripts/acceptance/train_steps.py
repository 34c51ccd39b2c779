"""Steps about training one model on the card: exact, fast, and saved at little cost."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
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


def speed(here: Here) -> None:
    """Muster beside a loop by hand: the same model, optimizer and precision, A/B/A."""
    contests = [
        ("Gpt", 16, 20, 100, 0.97),
        ("Mlp", 256, 200, 2000, 0.90),
    ]
    for name, batch, first, last, goal in [("Mlp", 32, 4, 12, 0.0)] if here.rehearse else contests:
        before = _by_hand(here, name, batch, first, last)
        ours, results = _by_muster(here, name, batch, first, last)
        after = before if here.rehearse else _by_hand(here, name, batch, first, last)
        best = max(before, after)
        here.note(f"{name} by hand, samples/s", [round(before, 1), round(after, 1)])
        here.note(f"{name} by muster, samples/s", ours)
        here.fast(f"{name}, share of the loop by hand", ours / best, at_least=goal)
        said = results["measured"]["samples_per_s"]
        here.fast(f"{name}, samples/s as reported and as they are", said / ours, at_most=1.01)
        here.note(f"{name}, MFU", results["measured"].get("mfu"))


def _by_hand(here: Here, name: str, batch: int, first: int, last: int) -> float:
    command = [sys.executable, "-m", _TASKS, name, str(batch), str(last + 1), here.device]
    return _clocked(here, command, batch, first, last)


def _by_muster(
    here: Here, name: str, batch: int, first: int, last: int, *more: str, run: str = ""
) -> tuple[float, dict[str, Any]]:
    run = run or f"run-{name}"
    command = [
        sys.executable, "-m", "muster", "train", f"{_TASKS}:{name}", "--devices", here.devices,
        "--batch-size", str(batch), "--max-steps", str(last + 1), "--epochs", "1000",
        "--lr", "1e-4", "--schedule", "constant",
        "--precision", "bf16" if here.device == "cuda" else "fp32",
        "--eval-frequency", "0", "--no-tensorboard", "--run-dir", run,
        *(["--small"] if here.rehearse else []), *(more or ("--checkpoint-interval", "1h")),
    ]  # fmt: skip
    rate = _clocked(here, command, batch, first, last)
    return rate, json.loads((here.folder / run / "training_results.json").read_text())


def _clocked(here: Here, command: list[str], batch: int, first: int, last: int) -> float:
    """Samples per second between two steps of a program, by its own clock."""
    clock = here.folder / "clock.json"
    clock.unlink(missing_ok=True)
    here.run(command, env={"FIRST": str(first), "LAST": str(last), "CLOCK": str(clock)})
    found = json.loads(clock.read_text())
    return float(batch * found["steps"] / found["seconds"])


def saving(here: Here) -> None:
    """What a checkpoint every fifty steps costs, beside a plain copy of the same bytes."""
    import torch

    batch, first, last = here.size(16, 4), here.size(20, 2), here.size(125, 12)
    every = ("--checkpoint-interval", f"{here.size(50, 5)}steps")
    plain, _ = _by_muster(here, "Gpt", batch, first, last, run="plain")
    saved, results = _by_muster(here, "Gpt", batch, first, last, *every, run="saved")
    stall = plain / saved - 1
    here.fast("share of the time that saving takes", stall, at_most=0.02)
    here.note("checkpoints", len(list((here.folder / "saved/checkpoints").glob("step-*"))))
    num_bytes = here.size(1_500_000_000, 1_000_000)
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=here.device)
    target = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=here.device == "cuda")
    copy = here.seconds(lambda: target.copy_(source, non_blocking=True))
    here.note("s to copy 1.5 GB to pinned memory", copy)
    here.note("steps per s without and with", [plain / batch, saved / batch])
    here.note("measured", {k: v for k, v in results["measured"].items() if isinstance(v, float)})
