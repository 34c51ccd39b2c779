"""How many threads a rank gets where somebody has said a number."""

from __future__ import annotations

from pathlib import Path

import pytest

from muster.api.gangs.gang import plan_gang
from muster.api.gangs.work import GangWork
from muster.api.start.options import GangOptions
from muster.gang.spec import Script
from muster.run.folder import RunFolder


@pytest.mark.parametrize(("folder", "threads"), [(None, 6), ("", 6), ("saved", 3)])
def test_the_ranks_of_a_task_share_what_its_worker_has(
    folder: str | None, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user's own number is of each rank. An empty variable is one of a task further out."""
    monkeypatch.setenv("OMP_NUM_THREADS", "6")
    if folder is not None:
        monkeypatch.setenv("MUSTER_CHECKPOINT_DIR", folder)
    options = GangOptions(devices="cpu:2")
    work = GangWork(folder=RunFolder(tmp_path), program=Script(path="train.py", args=()))
    plan = plan_gang(work, options)
    assert plan.threads_per_rank == threads
