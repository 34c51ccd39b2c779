"""Trainings on a CUDA device: against the CPU, resumed, short of memory, in every precision."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.programs import read_program
from tests.unit.train.toy_tasks import Toy

from muster.run.folder import RunFolder
from muster.train.config import TrainConfig
from muster.train.loop import train as train_here

pytestmark = pytest.mark.gpu

TASK = read_program("curve_task.py")


def train(folder: Path, run: str, *flags: str, code: int = 0) -> tuple[list[float], dict[str, Any]]:
    """Losses of all steps and the results of ``muster train``."""
    (folder / "curve.py").write_text(TASK)
    command = [
        *(sys.executable, "-m", "muster", "train", "curve.py:Curve", "--run-dir", run),
        *("--epochs", "4", "--batch-size", "16", "--lr", "0.01", "--no-tensorboard", *flags),
    ]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stdout + done.stderr
    lines = map(json.loads, (folder / run / "metrics.jsonl").read_text().splitlines())
    losses = [line["loss"] for line in lines if line["kind"] == "train"]
    path = folder / run / "training_results.json"
    results = {"said": done.stdout, **(json.loads(path.read_text()) if path.exists() else {})}
    return losses, results


def test_float64_on_the_gpu_is_float64_on_the_cpu(tmp_path: Path) -> None:
    on_gpu, found = train(tmp_path, "gpu", "--devices", "1", "--precision", "fp32")
    on_cpu, _ = train(tmp_path, "cpu", "--devices", "cpu:1")
    assert found["device"] == "cuda"
    assert on_gpu == pytest.approx(on_cpu, rel=1e-10)


def test_a_stopped_training_goes_on_bit_by_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ("--devices", "1", "--deterministic", "--dropout", "0.3")
    whole, _ = train(tmp_path, "whole", *flags)
    monkeypatch.setenv("STOP_AT", "21")
    train(tmp_path, "again", *flags, code=75)
    monkeypatch.delenv("STOP_AT")
    again, _ = train(tmp_path, "again", *flags)
    assert again == whole


@pytest.mark.parametrize("precision", ["tf32", "bf16", "fp16"])
def test_every_precision_learns_what_fp32_learns(precision: str, tmp_path: Path) -> None:
    if precision != "fp16" and torch.cuda.get_device_capability() < (8, 0):
        pytest.skip(f"this card has no {precision}")
    flags = ("--devices", "1", "--no-double", "--epochs", "20")
    exact, _ = train(tmp_path, "fp32", *flags, "--precision", "fp32")
    rounded, found = train(tmp_path, precision, *flags, "--precision", precision)
    assert found["precision"].startswith(precision)
    assert rounded[-1] == pytest.approx(exact[-1], rel=0.1, abs=0.01)


def test_cuda_memory_that_runs_out_halves_the_micro_batch(tmp_path: Path) -> None:
    """16 samples ask for twice the card's memory; what fits is the same training."""
    total_mib = torch.cuda.get_device_properties(0).total_memory >> 20
    hungry = ("--hungry-mib", str(total_mib // 8))
    flags = ("--devices", "1", "--precision", "fp32", "--global-batch", "16")
    plain, _ = train(tmp_path, "plain", *flags)
    short, found = train(tmp_path, "short", *flags, *hungry)
    assert found["micro_batch"] < 16
    assert found["global_batch"] == 16
    assert short == pytest.approx(plain, rel=1e-10)
    assert "memory     ran out" in found["said"]


def test_loader_processes_and_pinned_copies_change_nothing(tmp_path: Path) -> None:
    flags = ("--devices", "1", "--precision", "fp32")
    here, _ = train(tmp_path, "here", *flags, "--num-workers", "0")
    there, _ = train(tmp_path, "there", *flags, "--num-workers", "2")
    assert there == here


def test_the_norm_of_every_step_is_recorded(tmp_path: Path) -> None:
    train(tmp_path, "gpu", "--devices", "1", "--max-grad-norm", "1.0")
    lines = map(json.loads, (tmp_path / "gpu/metrics.jsonl").read_text().splitlines())
    norms = [line["grad_norm"] for line in lines if line["kind"] == "train"]
    assert norms and all(norm > 0 for norm in norms)


@dataclass(kw_only=True)
class Watched(Toy):
    """From the fourth step on, torch complains about whatever makes the host wait."""

    count: int = 0

    def loss(self, model: torch.nn.Module, batch: Any) -> Any:
        if model.training and not self.rehearsing:
            self.count += 1
            torch.cuda.set_sync_debug_mode("warn" if 4 <= self.count < 20 else "default")
        return super().loss(model, batch)


def test_a_step_makes_the_host_wait_for_nothing(tmp_path: Path) -> None:
    config = TrainConfig(
        global_batch=8, epochs=1, max_steps=24, eval_frequency=0, max_grad_norm=1.0,
        tensorboard=False, log_every=1,
    )  # fmt: skip
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            toy = Watched(samples=192, val=0, dtype="float32")
            train_here(toy, config, RunFolder(tmp_path), None, lambda line: None)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    # Not its notice that the mode itself is a prototype, which speaks of synchronizing as well.
    waits = [each for each in found if "called a synchronizing CUDA" in str(each.message)]
    assert not waits, "\n".join(f"{each.filename}:{each.lineno}" for each in waits)
