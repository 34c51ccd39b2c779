"""In the caller's own process a task is told its GPU by the number that it has there."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from muster.farm import canonical
from muster.farm.events import Results
from muster.farm.executors.base import Assignment
from muster.farm.executors.inline import InlineExecutor
from muster.farm.task import SlotSpec, TargetSpec, Task
from muster.run.folder import RunFolder

TARGET = """
import os
import sys

def f(i: int, ctx):
    return {"device": ctx.device, "visible": os.environ.get("CUDA_VISIBLE_DEVICES", "all")}
"""


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
    [value] = [item.value for e in events if isinstance(e, Results) for item in e.finished]
    assert canonical.decode(value) == {"device": device, "visible": visible}
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
