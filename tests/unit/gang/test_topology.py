from __future__ import annotations

import pytest

from muster.base.errors import UsageError
from muster.gang.topology import Meeting, Topology, first_host, read_meeting, read_topology

TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "host",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}


def test_torchrun() -> None:
    assert read_topology(TORCHRUN) == Topology(5, 1, 8, 4, 1, 2, "host", 29400, 2, "torchrun")


def test_what_torchrun_does_not_say_follows_from_the_rest() -> None:
    few = {k: v for k, v in TORCHRUN.items() if not k.startswith(("GROUP", "TORCHELASTIC"))}
    assert read_topology(few) == Topology(5, 1, 8, 4, 1, 2, "host", 29400, 0, "torchrun")


def test_slurm_inside_a_step_of_several_tasks() -> None:
    found = read_topology(SLURM)
    assert found is not None
    assert (found.rank, found.local_rank, found.world_size, found.local_world_size) == (3, 1, 4, 2)
    assert (found.node_rank, found.num_nodes, found.master_addr) == (1, 2, "gpu07")
    assert found.launcher == "slurm" and 20000 <= found.master_port < 40000


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"RANK": "3"},
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"},  # a batch script
        {**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},  # srun --pty bash
    ],
)
def test_no_launcher(environment: dict[str, str]) -> None:
    assert read_topology(environment) is None


def test_torchrun_comes_before_slurm() -> None:
    found = read_topology({**SLURM, **TORCHRUN})
    assert found is not None and found.launcher == "torchrun"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": "8"}, "rank 8 is not below world size 8"),
        ({"LOCAL_RANK": "4"}, "local rank 4 is not below ranks per node 4"),
        ({"GROUP_RANK": "2"}, "node rank 2 is not below number of nodes 2"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE=two is not a whole number"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT 0 is not a port"),
        ({"WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "7"}, "7 ranks on this node are more"),
    ],
)
def test_contradictions_are_refused(change: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_topology({**TORCHRUN, **change})


def test_a_launcher_that_says_half_is_refused() -> None:
    with pytest.raises(UsageError, match=r"LOCAL_RANK, MASTER_ADDR, MASTER_PORT are not"):
        read_topology({"RANK": "0", "WORLD_SIZE": "2"})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu[007-010,12],login", "gpu007"),
        ("a,b", "a"),
        ("gpu-1", "gpu-1"),
        ("n[3]-ib", "n3-ib"),
        ("", ""),
    ],
)
def test_the_first_host_of_a_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


@pytest.mark.parametrize(
    ("environment", "meeting"),
    [
        ({}, Meeting()),
        ({"MASTER_ADDR": "a", "MASTER_PORT": "7", "NODE_RANK": "1"}, Meeting(1, "a", 7)),
        ({"PET_MASTER_ADDR": "a", "PET_NODE_RANK": "2"}, Meeting(2, "a", None)),
        ({"PET_MASTER_PORT": "8", "MASTER_PORT": "7"}, Meeting(None, None, 8)),
        ({"MASTER_ADDR": "", "NODE_RANK": ""}, Meeting()),
    ],
)
def test_where_nodes_meet_by_the_environment(environment: dict[str, str], meeting: Meeting) -> None:
    assert read_meeting(environment) == meeting


def test_a_port_that_is_none_is_refused() -> None:
    with pytest.raises(UsageError, match="MASTER_PORT=http of the environment"):
        read_meeting({"MASTER_PORT": "http"})
