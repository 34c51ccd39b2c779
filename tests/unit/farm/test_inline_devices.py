"""In the caller's own process a task is told its GPU by the number that it has there."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from muster.farm import canonical
from muster.farm.events import Results
from muster.farm.executors.base import Assignment
from muster.farm.executors.inline import InlineExecutor
from muster.farm.task import Finished, Outcome, SlotSpec, TargetSpec, Task
from muster.run.folder import RunFolder

TARGET = """
import os
import sys

def f(i: int, ctx):
    return {"device": ctx.device, "visible": os.environ.get("CUDA_VISIBLE_DEVICES", "all")}
"""


def finished(tmp_path: Path, slot: SlotSpec) -> list[Finished]:
    """What becomes of one task there."""
    folder = RunFolder(tmp_path / "run")
    folder.create()
    spec = TargetSpec(
        name="f", location=str(tmp_path / "target.py"), attribute="f", base_folder=str(tmp_path)
    )
    executor = InlineExecutor(Assignment(folder=folder, run_id="r", targets={1: spec}))
    executor.start(1, slot)
    executor.send(1, [Task(1, b"k" * 8, 1, canonical.encode({"i": 1}), 0, 1)], together=False)
    events = [event for _ in range(2) for event in executor.poll(0.0)]
    executor.close()
    return [item for e in events if isinstance(e, Results) for item in e.finished]


@pytest.mark.parametrize(
    ("slot", "device", "visible"),
    [
        (SlotSpec(slot_id=0, label="cuda:1", devices=("GPU-b",), kind="cuda"), "cuda:1", "all"),
        (SlotSpec(slot_id=0, label="cuda:1/2", devices=("GPU-b",), kind="cuda"), "cuda:1", "all"),
        (SlotSpec(slot_id=0, label="cuda:2+3", devices=("a", "b"), kind="cuda"), "cuda:2", "all"),
        (SlotSpec(slot_id=0, label="cpu:1", devices=()), "cpu", ""),
    ],
)
def test_the_device_of_a_task(
    slot: SlotSpec, device: str, visible: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    # Other tests may have brought torch, which has no CUDA here.
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    (tmp_path / "target.py").write_text(TARGET)
    [item] = finished(tmp_path, slot)
    assert canonical.decode(item.value) == {"device": device, "visible": visible}
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


RAISES = "def f(i: int):\n    raise AssertionError('it would compute on another device')\n"
RETURNS = "def f(i: int):\n    return {}\n"


def choosing(monkeypatch: pytest.MonkeyPatch, *, is_available: bool) -> None:
    """A torch that can choose no GPU."""

    def refuse(device: str) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    cuda: Any = types.SimpleNamespace(set_device=refuse, is_available=lambda: is_available)
    cuda.is_initialized = lambda: False
    torch: Any = types.ModuleType("torch")
    torch.cuda, torch.manual_seed, torch.Tensor = cuda, lambda seed: None, type("Tensor", (), {})
    monkeypatch.setitem(sys.modules, "torch", torch)


def test_a_gpu_that_cannot_be_chosen_is_a_fault_of_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choosing(monkeypatch, is_available=True)
    (tmp_path / "target.py").write_text(RAISES)
    slot = SlotSpec(slot_id=0, label="cuda:1", devices=("GPU-b",), kind="cuda")
    [item] = finished(tmp_path, slot)
    assert (item.outcome, item.poisoned) == (Outcome.DEVICE_FAULT, True)
    assert item.message.startswith("cuda:1 cannot be used in this process: RuntimeError: CUDA")


def test_a_torch_for_the_cpu_has_no_gpu_to_choose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choosing(monkeypatch, is_available=False)
    monkeypatch.setenv("MUSTER_ALLOW_CPU_TORCH", "1")
    (tmp_path / "target.py").write_text(RETURNS)
    slot = SlotSpec(slot_id=0, label="cuda:1", devices=("GPU-b",), kind="cuda")
    [item] = finished(tmp_path, slot)
    assert item.outcome is Outcome.OK
