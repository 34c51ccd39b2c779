"""A search whose workers are far: they hear that they are to pause, and promoted trials go on.

On Ray: test_ray_farm.py, which has a cluster.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.slurm_cluster import SlurmCluster

import muster
from muster.farm.executors.cluster import ClusterRequest
from muster.farm.ledger.read import LedgerReader
from muster.farm.metrics import curves_of
from muster.farm.task import TaskState

TRAIN = """
import time

def run(lr: float, ctx):
    state = ctx.restore() or {"epoch": 0}
    for epoch in range(state["epoch"], 9):
        ctx.log(epoch + 1, accuracy=1 - abs(lr - 0.3) - 1 / (epoch + 2), start=state["epoch"])
        ctx.checkpoint({"epoch": epoch + 1})
        time.sleep(0.01)
    return {"accuracy": 1 - abs(lr - 0.3)}
"""


def search(place: Path, executor: str, cluster: ClusterRequest) -> None:
    """ASHA over 9 trials; every trial ends at a rung or at the end, and goes on where it was."""
    (place / "train.py").write_text(TRAIN)
    run = muster.sweep(
        "train.py:run", space={"lr": muster.Space.uniform(0, 1)}, maximize="accuracy", trials=9,
        stop="asha:min=1,max=9", try_=[{"lr": 0.3}], executor=executor, cluster=cluster,
        monitor_interval_s=0, run_dir=place / "it",
    )  # fmt: skip
    with LedgerReader(run.folder.ledger) as reader:
        kinds = [b'"kind":"promote"' in row.body for row in reader.search_rows()]
        tasks = list(reader.tasks())
        curves = {task.task_id: curves_of(reader, task.task_id) for task in tasks}
    assert len(tasks) == 9
    assert {task.state for task in tasks} == {TaskState.DONE, TaskState.STOPPED}
    assert sum(kinds) >= 3, "the best went on"
    for task in tasks:
        steps = curves[task.task_id]["accuracy"].step.tolist()
        assert steps == list(range(1, len(steps) + 1)), "none is missing, and none came twice"
        if task.state is TaskState.DONE:
            assert len(steps) == 9
        else:
            assert len(steps) in (1, 3), "it ended at a rung"
    assert any(set(curve["start"].value.tolist()) >= {0.0, 1.0} for curve in curves.values())


def population(place: Path, executor: str, cluster: ClusterRequest) -> None:
    """Whose trials begin with the checkpoints of others, wherever those ran."""
    (place / "train.py").write_text(TRAIN)
    run = muster.sweep(
        "train.py:run", space={"lr": muster.Space.uniform(0, 1)}, maximize="accuracy", trials=4,
        stop="pbt:min=3,max=9", executor=executor, cluster=cluster,
        monitor_interval_s=0, run_dir=place / "it",
    )  # fmt: skip
    origins = {row["task"]: row["from_task"] for row in run.results().to_pylist()}
    begun = [
        one.curve.step[0] for one in run.series() if one.name == "accuracy" and origins[one.task]
    ]
    assert sorted(begun) == [4, 7], "one heir at each mark, behind its parent's step"


@pytest.mark.slow
@pytest.mark.slurm
def test_a_population_with_workers_in_jobs(
    slurm: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    population(tmp_path, "slurm", ClusterRequest(num_workers=2, gpus_per_worker=1))


@pytest.mark.slurm
def test_a_search_with_workers_in_jobs(
    slurm: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    search(tmp_path, "slurm", ClusterRequest(num_workers=2, gpus_per_worker=1))
    assert slurm.squeue() == []
