"""``muster.fit`` in this process computes where it was placed, whatever torch could use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.train.toy_tasks import Toy

import muster


@pytest.fixture(autouse=True)
def a_busy_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch sees a GPU that somebody else fills."""
    holder = {"pid": 4242, "user": "ada", "used_mib": 70000}
    device = {
        "index": 0, "uuid": "GPU-aaaaaaaa-0000-0000-0000-000000000001",
        "name": "NVIDIA H100 80GB HBM3", "memory_total_mib": 81559, "memory_used_mib": 70000,
        "holders": [holder],
    }  # fmt: skip
    facts = {"driver_version": "580.65.06", "cuda_driver_version": [13, 0], "problem": None}
    (tmp_path / "facts.json").write_text(json.dumps({**facts, "devices": [device]}))
    monkeypatch.setenv("MUSTER_DEVICE_FACTS", str(tmp_path / "facts.json"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)

    def refuse(device: Any) -> None:
        raise AssertionError(f"took {device} without being asked")

    monkeypatch.setattr(torch.cuda, "set_device", refuse)


@pytest.mark.parametrize("devices", ["cpu", "cpu:1", "auto"])
def test_a_gpu_is_not_taken_without_being_asked(devices: str, tmp_path: Path) -> None:
    done = muster.fit(
        Toy(samples=16, val=4), epochs=1, batch_size=8, tensorboard=False, devices=devices,
        run_dir=tmp_path / "r",
    )  # fmt: skip
    assert done.exit_code == 0
    assert json.loads((tmp_path / "r/training_results.json").read_text())["device"] == "cpu"
