"""Nodes of a Ray cluster are killed while a sweep runs: nothing is lost, nothing is doubled."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.ray_cluster import RayCluster, may_mount

import muster
from muster.farm.executors.cluster import ClusterRequest

pytestmark = pytest.mark.ray

TARGET = """
import time

def slow(x: int):
    time.sleep(0.2)
    return {"y": x * x}

def count(x: int, ctx):
    state = ctx.restore() or {"n": 0}
    begun_at = state["n"]
    for n in range(begun_at, 40):
        time.sleep(0.1)
        ctx.checkpoint({"n": n + 1})
    return {"begun_at": begun_at, "n": n + 1, "attempt": ctx.attempt}
"""


@pytest.fixture
def place(ray_driver: RayCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working folder that only the first node sees."""
    if not may_mount():
        pytest.skip("hiding a folder from a node needs the right to mount")
    place = ray_driver.hidden / "chaos"
    place.mkdir(exist_ok=True)
    (place / "target.py").write_text(TARGET)
    monkeypatch.chdir(place)
    yield place


def _node_of_the_worker(cluster: RayCluster) -> str:
    for ip in cluster.nodes:
        for process in cluster.processes(ip):
            if "muster.farm.worker.main" in " ".join(process.cmdline()):
                return ip
    raise AssertionError("no node has a worker")


@pytest.mark.slow
def test_a_task_goes_on_from_its_checkpoint_on_another_node(
    ray_driver: RayCluster, place: Path
) -> None:
    ray_driver.add(cpus=2, gpus=1, hidden=ray_driver.hidden)
    killed: list[str] = []

    def show(view: Any) -> None:
        if not killed and list(place.glob("runs/*/checkpoints/*.ckpt")):
            killed.append(_node_of_the_worker(ray_driver))
            ray_driver.kill(killed[0])

    run = muster.sweep(
        "target.py:count", grid={"x": [1]}, executor="ray", monitor_interval_s=0, show=show,
        cluster=ClusterRequest(num_workers=1, gpus_per_worker=1),
    )  # fmt: skip
    [row] = run.results().to_pylist()
    assert killed
    assert (row["n"], row["state"]) == (40, "done")
    assert row["begun_at"] > 0, "the checkpoint came with it"
    assert list(run.folder.checkpoints.iterdir()) == []
    assert [part.outcome for part, _ in run.log(row["task"])] == ["lost", "ok"]


def test_the_loss_of_a_node_loses_and_doubles_nothing(ray_driver: RayCluster, place: Path) -> None:
    ip = ray_driver.add(cpus=2, hidden=ray_driver.hidden)
    num_workers = 2 * len([1 for ip in ray_driver.nodes if ray_driver.processes(ip)])
    killed: list[str] = []

    def show(view: Any) -> None:
        all_work = all(line.state == "running" for line in view.workers)
        if not killed and all_work and view.num_done >= 15:
            killed.append(ip)
            ray_driver.kill(ip)

    run = muster.sweep(
        "target.py:slow", grid={"x": range(150)}, executor="ray", monitor_interval_s=0, show=show,
        cluster=ClusterRequest(num_workers=num_workers), retries=0,  # a loss is no try
    )  # fmt: skip
    assert killed
    assert run.exit_code == 0
    rows = sorted(run.results().to_pylist(), key=lambda row: row["x"])
    assert [(row["x"], row["y"]) for row in rows] == [(x, x * x) for x in range(150)]
    assert run.status().num_retried >= 1, "the node was at work"
