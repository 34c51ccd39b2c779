"""Reading what measured steps have left; the steps themselves are in tests/integration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from muster.base.errors import SetupError
from muster.plan.calibrate import Calibration, Probe, Steps, read_steps, sum_up
from muster.run.folder import RunFolder

PRINTED = "batch …\ntrain      67,754 parameters, 1,295 samples, 21 steps per epoch, 30 to go\n"
PROBE = Probe(task="t.py:Task", flags=(), num_steps=10, card="NVIDIA L40S")


def folder(tmp_path: Path, seconds: list[float], **changes: Any) -> RunFolder:
    """A finished training with these steps, as `muster train` leaves it on a GPU."""
    found = RunFolder(tmp_path)
    results = {
        "parameters": 67754, "device": "cuda", "precision": "bf16 (auto: has it)",
        "global_batch": 64, "micro_batch": 32, "accumulation": 2,
        "measured": {"data_wait_share": 0.25, "communication_share": 0.0,
                     "peak_memory_mib": [1500.0], "flops_per_sample": 2e9},
        **changes,
    }  # fmt: skip
    found.training_results.write_text(json.dumps(results))
    found.run_json.write_text(json.dumps({"spec": {"config": {"epochs": 20}}}))
    lines = [{"kind": "train", "step": n, "seconds": s} for n, s in enumerate(seconds, 1)]
    found.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return found


def test_steps_are_read_without_the_warm_up(tmp_path: Path) -> None:
    # 10 steps: the first two (a fifth) do not count; of the rest the median is 0.4 s, which is two
    # micro-batches of 0.2 s, a quarter of it waiting for data.
    seconds = [9.0, 9.0, 0.4, 0.4, 0.4, 0.4, 0.4, 0.4, 5.0, 5.0]
    steps = read_steps(folder(tmp_path, seconds), PRINTED)
    assert (steps.samples, steps.global_batch, steps.num_steps) == (32, 64, 8)
    assert steps.loading_s == pytest.approx(0.05)
    assert steps.compute_s == pytest.approx(0.15)
    assert (steps.num_samples, steps.epochs, steps.precision) == (1295, 20, "bf16")
    assert (steps.peak_memory_mib, steps.flops_per_sample) == (1500.0, 2e9)


def test_both_ends_can_be_left_out(tmp_path: Path) -> None:
    seconds = [9.0] * 3 + [0.4, 0.6, 0.6, 0.8] + [9.0] * 3
    steps = read_steps(folder(tmp_path, seconds), PRINTED, trim=0.3)
    assert steps.num_steps == 4
    assert steps.compute_s + steps.loading_s == pytest.approx(0.3)


def test_too_few_steps_are_told(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="Only 4 steps could be measured"):
        read_steps(folder(tmp_path, [1.0] * 4), PRINTED)


def steps(
    samples: int, seconds: float, memory_mib: float | None, kept: float | None = None
) -> Steps:
    return Steps(
        samples=samples, compute_s=seconds, loading_s=0.001 * samples, num_steps=20,
        global_batch=64, parameters=67754, precision="bf16",
        peak_memory_mib=memory_mib, flops_per_sample=2e9, num_samples=1295, epochs=20,
        kept_bytes_per_sample=kept,
    )  # fmt: skip


def calibration(*found: Steps) -> Calibration:
    return sum_up(found, PROBE)


def test_two_batches_tell_a_step_from_a_sample_and_memory_too() -> None:
    found = calibration(steps(64, 0.5, 1700.0), steps(16, 0.2, 500.0))
    assert found.compute.per_sample.value.value == pytest.approx(0.00625)
    assert found.compute.fixed.value.value == pytest.approx(0.1)
    # 1,200 MiB for 48 more samples: 25 MiB each.
    assert found.activations is not None
    assert found.activations.value.value == pytest.approx(25 * 2**20)
    assert found.activations.origin == "measured"
    assert found.loading.value.value == pytest.approx(0.001)


def test_on_a_cpu_it_is_what_autograd_was_seen_to_keep() -> None:
    found = calibration(steps(64, 0.5, None, 60e3), steps(16, 0.2, None, 60e3))
    assert found.activations is not None
    assert found.activations.value.value == 60e3
    # Where a GPU has measured its memory, that counts.
    found = calibration(steps(64, 0.5, 1700.0, 60e3), steps(16, 0.2, 500.0, 60e3))
    assert found.activations is not None
    assert found.activations.value.value == pytest.approx(25 * 2**20)


def test_one_batch_says_nothing_about_memory_nor_does_a_cpu() -> None:
    assert calibration(steps(64, 0.5, 1700.0)).activations is None
    assert calibration(steps(64, 0.5, None), steps(16, 0.2, None)).activations is None
