"""What a gang is, as a value that crosses from the launcher to the supervisor as JSON. No torch."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from muster.base.codec import as_read_back
from muster.base.flags import Flag
from muster.gang.topology import SlotKind
from muster.run.folder import RunFolder

Start = Literal["exec", "fork", "spawn"]


@dataclass(frozen=True, kw_only=True)
class Script:
    """What SCRIPT is: a Python file, a module, or any other program."""

    path: str
    args: tuple[str, ...] = ()
    is_module: Annotated[bool, Flag(name="module", aliases=("m",))] = False
    """SCRIPT is a module: package.module."""
    is_python: Annotated[bool, Flag(name="no-python", is_negated=True)] = True
    """SCRIPT is any program, not Python."""

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2] if self.is_module else Path(self.path).stem


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A function that every rank calls with the same JSON parameters, as keywords."""

    target: str
    params: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.target.rpartition(":")[0].rpartition(".")[2]


@dataclass(frozen=True, kw_only=True)
class GangSpec:
    """Everything the supervisor must know.

    Attributes
        num_ranks: on this node; every node has as many, unless ``ranks_of_nodes`` says how many
            each has.
        slot: the kind of device under every rank; one on a GPU never computes on the CPU instead.
        visible_devices: CUDA_VISIBLE_DEVICES of every rank, where LOCAL_RANK picks; "" hides all
            GPUs, None leaves the variable as it is.
        restart_on: what ``max_restarts`` is for; a crash is a death by a signal, or a stall.
        start: "exec" and "spawn" start a fresh interpreter for each rank; "fork" forks them from
            a process that has imported torch (and the entry's module) once.
        min_nodes: go on with as few nodes as this when others are lost; needs ``max_restarts``.
        stall_timeout_s: the watchdog's limit; 0 switches it off.
        grace_s: how long ranks that were asked to end may take to save.
    """

    folder: RunFolder
    program: Script | Entry
    num_ranks: int
    slot: SlotKind | None = None
    visible_devices: str | None = ""
    threads_per_rank: int = 1
    max_restarts: int = 0
    restart_on: Literal["failure", "crash"] = "failure"
    start: Start = "exec"
    num_nodes: int = 1
    ranks_of_nodes: tuple[int, ...] = ()
    min_nodes: int | None = None
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    run_id: str = "gang"
    stall_timeout_s: float = 20.0
    grace_s: float = 15.0

    @property
    def world_size(self) -> int:
        return sum(self.ranks_of_nodes) or self.num_ranks * self.num_nodes

    @property
    def first_rank(self) -> int:
        """The global rank of this node's first rank, when all nodes take part."""
        if self.ranks_of_nodes:
            return sum(self.ranks_of_nodes[: self.node_rank])
        return self.node_rank * self.num_ranks

    def to_line(self) -> bytes:
        return json.dumps(as_read_back(self)).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> GangSpec:
        values = json.loads(line)
        program = values.pop("program")
        values["ranks_of_nodes"] = tuple(values["ranks_of_nodes"])
        folder = RunFolder(Path(values.pop("folder")["path"]))
        if "target" in program:
            return cls(folder=folder, program=Entry(**program), **values)
        program["args"] = tuple(program["args"])
        return cls(folder=folder, program=Script(**program), **values)
