"""Who this process is in a gang: the launcher's variables, read once into a value.

The first launcher that is recognised wins. torchrun (and muster, which speaks its language) comes
before SLURM, because it also runs inside SLURM jobs, whose variables then describe the job and not
the rank.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from muster.base.errors import UsageError

#: The kind of device under a rank; the launcher knows it from the driver, before torch has looked.
SlotKind = Literal["cuda", "cpu"]
SLOT = "MUSTER_SLOT"

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Topology:
    """One rank's place. ``rank`` counts over all nodes, ``local_rank`` on this one.

    ``restart_count``: how often the launcher has started the gang anew before this time; ``slot``:
    the kind of device it was placed on, None from a launcher that does not say.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node_rank: int
    num_nodes: int
    master_addr: str
    master_port: int
    restart_count: int
    launcher: Literal["torchrun", "slurm"]
    slot: SlotKind | None = None

    def __post_init__(self) -> None:
        for name, value, bound, limit in (
            ("rank", self.rank, "world size", self.world_size),
            ("local rank", self.local_rank, "ranks per node", self.local_world_size),
            ("node rank", self.node_rank, "number of nodes", self.num_nodes),
        ):
            if not 0 <= value < limit:
                raise _incoherent(self.launcher, f"{name} {value} is not below {bound} {limit}")
        if self.local_world_size > self.world_size:
            raise _incoherent(
                self.launcher,
                f"{self.local_world_size} ranks on this node are more than the world size "
                f"{self.world_size}",
            )
        if not 0 < self.master_port < 1 << 16:
            raise _incoherent(self.launcher, f"MASTER_PORT {self.master_port} is not a port")


def read_topology(environment: Mapping[str, str] | None = None) -> Topology | None:
    """This process's place in a gang, None when no launcher started it.

    ``environment``: the process's own by default. SLURM counts only inside a job step (``srun``)
    of more than one task: a batch script and a single ``srun`` are ordinary programs. Raises
    UsageError for values that contradict each other.
    """
    env = os.environ if environment is None else environment
    if "RANK" in env and "WORLD_SIZE" in env:
        return _of_torchrun(env)
    if "SLURM_STEP_ID" in env and "SLURM_PROCID" in env and _is_several(env):
        return _of_slurm(env)
    return None


def _is_several(env: Mapping[str, str]) -> bool:
    # An interactive shell (`srun --pty bash`) is a step too, of one task.
    return _whole(env, "SLURM_STEP_NUM_TASKS", "slurm", env.get("SLURM_NTASKS", "1")) > 1


def _of_torchrun(env: Mapping[str, str]) -> Topology:
    missing = [name for name in _TORCHRUN if name not in env]
    if missing:
        raise UsageError(
            f"RANK={env['RANK']} and WORLD_SIZE={env['WORLD_SIZE']} are set, "
            f"but {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not.",
            hint="unset RANK and WORLD_SIZE to run alone, or start with `muster run` or torchrun.",
        )
    world_size = _whole(env, "WORLD_SIZE", "torchrun")
    local_size = _whole(env, "LOCAL_WORLD_SIZE", "torchrun", str(world_size))
    rank = _whole(env, "RANK", "torchrun")
    nodes = str(-(-world_size // max(1, local_size)))
    return Topology(
        rank=rank,
        local_rank=_whole(env, "LOCAL_RANK", "torchrun"),
        world_size=world_size,
        local_world_size=local_size,
        node_rank=_whole(env, "GROUP_RANK", "torchrun", str(rank // max(1, local_size))),
        num_nodes=_whole(env, "GROUP_WORLD_SIZE", "torchrun", nodes),
        master_addr=env["MASTER_ADDR"],
        master_port=_whole(env, "MASTER_PORT", "torchrun"),
        restart_count=_whole(env, "TORCHELASTIC_RESTART_COUNT", "torchrun", "0"),
        launcher="torchrun",
        slot=_slot(env.get(SLOT)),
    )


def _of_slurm(env: Mapping[str, str]) -> Topology:
    world_size = _whole(env, "SLURM_STEP_NUM_TASKS", "slurm", env.get("SLURM_NTASKS", ""))
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_NODELIST", "")
    per_node = _tasks_per_node(
        env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE", "")
    )
    node_rank = _whole(env, "SLURM_NODEID", "slurm", "0")
    return Topology(
        rank=_whole(env, "SLURM_PROCID", "slurm"),
        local_rank=_whole(env, "SLURM_LOCALID", "slurm"),
        world_size=world_size,
        local_world_size=per_node[node_rank] if node_rank < len(per_node) else world_size,
        node_rank=node_rank,
        num_nodes=_whole(env, "SLURM_STEP_NUM_NODES", "slurm", str(max(1, len(per_node)))),
        master_addr=env.get("MASTER_ADDR") or first_host(nodes) or "127.0.0.1",
        master_port=_whole(env, "MASTER_PORT", "slurm", str(_port_of_job(env))),
        restart_count=_whole(env, "SLURM_RESTART_COUNT", "slurm", "0"),
        launcher="slurm",
    )


class Meeting(NamedTuple):
    """Where several nodes meet, and which of them this is; None for what is not set."""

    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None


def read_meeting(environment: Mapping[str, str] | None = None) -> Meeting:
    """What the environment says to a launcher on one of several nodes, where its flags do not.

    MASTER_ADDR, MASTER_PORT and NODE_RANK, as job scripts and operators set them; torchrun's own
    PET_ names come first.
    """
    env = os.environ if environment is None else environment

    def said(name: str) -> str | None:
        return env.get(f"PET_{name}") or env.get(name) or None

    def number(name: str) -> int | None:
        text = said(name)
        if text is None or text.isdecimal():
            return None if text is None else int(text)
        raise UsageError(
            f"{name}={text} of the environment is not a whole number.",
            hint=f"correct it, or give --{name.lower().replace('_', '-')}.",
        )

    return Meeting(number("NODE_RANK"), said("MASTER_ADDR"), number("MASTER_PORT"))


def _slot(text: str | None) -> SlotKind | None:
    return "cuda" if text == "cuda" else "cpu" if text == "cpu" else None


def set_default(name: str, value: str) -> None:
    """Set a variable for a library that reads it from the environment, unless it is set already."""
    os.environ.setdefault(name, value)


def first_host(nodes: str) -> str:
    """The first name in SLURM's short form of a list of hosts; empty for an empty list.

    >>> first_host("gpu[007-010,12],login"), first_host("a-1,b-2"), first_host("n[3]-ib")
    ('gpu007', 'a-1', 'n3-ib')
    """
    found = re.match(r"([^\[,]*)(?:\[(\w+)[^\]]*\]([^,]*))?", nodes.strip())
    assert found is not None
    return "".join(part or "" for part in found.groups())


def _tasks_per_node(text: str) -> list[int]:
    """``2(x3),1`` as ``[2, 2, 2, 1]``."""
    counts: list[int] = []
    for number, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(number)] * int(times or 1)
    return counts


def _port_of_job(env: Mapping[str, str]) -> int:
    """A port that all ranks compute alike without talking: it follows from the job and step."""
    job = int(env.get("SLURM_JOB_ID", "0") or 0)
    step = int(env["SLURM_STEP_ID"]) if env["SLURM_STEP_ID"].isdigit() else 0
    return 20000 + (job * 7 + step) % 20000


def _whole(env: Mapping[str, str], name: str, launcher: str, default: str | None = None) -> int:
    text = env.get(name, default)
    if text is None or text == "":
        raise _incoherent(launcher, f"{name} is not set")
    try:
        return int(text)
    except ValueError:
        raise _incoherent(launcher, f"{name}={text} is not a whole number") from None


def _incoherent(launcher: str, what: str) -> UsageError:
    return UsageError(
        f"The variables that {launcher} sets for each rank contradict each other: {what}.",
        hint="unset them to run alone, or start with `muster run`.",
    )
