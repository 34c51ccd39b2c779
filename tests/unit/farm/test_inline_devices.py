"""In the caller's own process a task is told its GPU by the number that it has there."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from tests.programs import read_program

from muster.farm import canonical
from muster.farm.events import Event, Results, Returned, WorkerDied, WorkerReady
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


def events_of(tmp_path: Path, slot: SlotSpec, *, count: int = 1) -> list[Event]:
    """What is heard of ``count`` tasks there, after the worker is ready."""
    folder = RunFolder(tmp_path / "run")
    folder.create()
    spec = TargetSpec(
        name="f", location=str(tmp_path / "target.py"), attribute="f", base_folder=str(tmp_path)
    )
    executor = InlineExecutor(Assignment(folder=folder, run_id="r", targets={1: spec}))
    executor.start(1, slot)
    [ready] = executor.poll(0.0)
    assert isinstance(ready, WorkerReady)
    tasks = [Task(i, b"k" * 8, 1, canonical.encode({"i": i}), 0, 1) for i in range(1, count + 1)]
    executor.send(1, tasks, together=False)
    events = [event for _ in range(count + 1) for event in executor.poll(0.0)]
    executor.close()
    return events


def finished(tmp_path: Path, slot: SlotSpec) -> list[Finished]:
    """What becomes of one task there."""
    events = events_of(tmp_path, slot)
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
    [back, died] = events_of(tmp_path, slot, count=2)
    assert back == Returned(1, [1, 2])
    assert isinstance(died, WorkerDied)
    assert "nothing runs on it in this process any more: RuntimeError: CUDA" in died.stuck


def test_a_torch_for_the_cpu_has_no_gpu_to_choose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choosing(monkeypatch, is_available=False)
    monkeypatch.setenv("MUSTER_ALLOW_CPU_TORCH", "1")
    (tmp_path / "target.py").write_text(RETURNS)
    slot = SlotSpec(slot_id=0, label="cuda:1", devices=("GPU-b",), kind="cuda")
    [item] = finished(tmp_path, slot)
    assert item.outcome is Outcome.OK


BREAKS = (
    read_program("pretend_gpu.py")
    + """
def f(i: int):
    return poisons(i + 1, "returns")
"""
)


def test_tasks_that_wait_do_not_meet_the_context_that_one_has_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setenv("MUSTER_ALLOW_CPU_TORCH", "1")
    (tmp_path / "target.py").write_text(BREAKS)
    slot = SlotSpec(slot_id=0, label="cuda:0", devices=("GPU-a",), kind="cuda")
    events = events_of(tmp_path, slot, count=5)
    ended = [item for e in events if isinstance(e, Results) for item in e.finished]
    assert [item.outcome for item in ended] == [Outcome.OK, Outcome.EXCEPTION]
    assert [type(event) for event in events] == [Results, Results, Returned, WorkerDied]
    assert events[2] == Returned(1, [3, 4, 5])
    sys.modules.pop("torch")
