"""A function that asks whether it is to end, and ends."""

from __future__ import annotations

import secrets
import sys
import time
from pathlib import Path
from typing import Literal

import pytest
from tests.unit.farm.test_metric_stream import Sent

from muster.farm.executors.base import Assignment
from muster.farm.executors.local import LocalExecutor
from muster.farm.task import Order, Outcome, SlotSpec, TargetSpec
from muster.farm.worker.perform import Performer
from muster.run.folder import RunFolder

SOURCE = """
def asks(ctx):
    return {"y": 1 if ctx.should_stop else 2}

def does_not_ask(ctx):
    return {"y": 2}
"""


class Told(Sent):
    confirms_meanwhile = True

    def __init__(self, how: Literal["stop", "pause"] | None) -> None:
        super().__init__()
        self.how = how

    def halted(self, task_id: int) -> Literal["stop", "pause"] | None:  # type: ignore[override]
        return self.how


@pytest.mark.parametrize("how", ["stop", "pause", None])
@pytest.mark.parametrize("name", ["asks", "does_not_ask"])
def test_what_it_returns_after_it_has_asked_is_no_result(
    name: str, how: Literal["stop", "pause"] | None, tmp_path: Path
) -> None:
    (tmp_path / "told.py").write_text(SOURCE)
    spec = TargetSpec(name="f", location="told.py", attribute=name, base_folder=str(tmp_path))
    folder = RunFolder(tmp_path / "run")
    performer = Performer({1: spec}, folder, "cpu", log=None, line=Told(how))
    finished = performer.run(Order(1, 1, 1, "0" * 32, 1, b"{}"))
    if how is not None and name == "asks":
        assert (finished.outcome, finished.value) == (Outcome.STOPPED, b"{}")
    else:
        assert (finished.outcome, finished.value) == (Outcome.OK, b'{"y":2}')


@pytest.mark.skipif(sys.platform == "win32", reason="a program that runs cannot be removed there")
def test_where_no_process_can_be_started_beside_it_a_worker_goes_on(tmp_path: Path) -> None:
    """The process of the next worker is only started early to save time."""
    (tmp_path / "told.py").write_text(SOURCE)
    spec = TargetSpec(name="f", location="told.py", attribute="asks", base_folder=str(tmp_path))
    folder = RunFolder(tmp_path / "run")
    folder.create()
    python = tmp_path / "python"
    python.symlink_to(sys.executable)
    run_id = "spare" + secrets.token_hex(12)
    executor = LocalExecutor(
        Assignment(folder=folder, run_id=run_id, targets={1: spec}, python=python)
    )
    try:
        executor.start(1, SlotSpec(slot_id=0, label="cpu0", devices=()))
        python.unlink()
        executor.stop_task(1, 1, pauses=False)
        until = time.monotonic() + 0.2
        while time.monotonic() < until:
            executor.poll(0.05)
    finally:
        executor.close()
