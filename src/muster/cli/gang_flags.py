"""The flags of commands that start a gang, and how they become options."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from muster.api.early import Meeting, read_meeting
from muster.api.gangs import GangOptions
from muster.api.options import parse_duration
from muster.base.errors import UsageError
from muster.cli.flags import (
    DeviceFlags,
    EarlierWorkFlags,
    ShownFlags,
    Switch,
    chosen_devices,
)
from muster.slurm.request import JobRequest
from muster.slurm.script import gang_warning_s

_D = GangOptions()


@dataclass(frozen=True, kw_only=True)
class ScriptFlags:
    """What SCRIPT is."""

    module: Annotated[Switch, tyro.conf.arg(aliases=["-m"])] = False
    """SCRIPT is a module: package.module."""
    no_python: Switch = False
    """SCRIPT is any program, not Python."""


@dataclass(frozen=True, kw_only=True)
class GangFlags:
    """How the ranks are started and watched. There is one rank per device."""

    nproc_per_node: int | None = None
    """How many ranks: on as many GPUs, or on the CPU where there is none."""
    start: Literal["auto", "exec", "fork", "spawn"] = "auto"
    """How a rank begins: exec or spawn (a fresh interpreter), fork (torch is imported once)."""
    max_restarts: int = _D.max_restarts
    """How often all ranks are started again after a failure."""
    stall_timeout: str = "20"
    """Say who holds the others up, and end, after this time without progress; 0: never."""
    grace: str = "15"
    """How long ranks may take to save after Ctrl-C or TERM; a second one kills them at once."""
    monitor_interval: str = "5"
    """How often GPUs and host are sampled into the run's monitor.csv; 0: never."""


@dataclass(frozen=True, kw_only=True)
class NodeFlags:
    """Several nodes: the same command on each, with another --node-rank."""

    nodes: Annotated[int, tyro.conf.arg(aliases=["--num-nodes", "--nnodes"])] = _D.num_nodes
    """How many nodes."""
    min_nodes: int | None = None
    """Go on with as few as this when nodes are lost; needs --max-restarts."""
    node_rank: int | None = None
    """Which node this is, from 0. Default: NODE_RANK of the environment, else 0."""
    master_addr: str | None = None
    """Where node 0 is. Default: MASTER_ADDR of the environment."""
    master_port: int | None = None
    """A free port there; the same on all nodes. Default: MASTER_PORT of the environment."""


@dataclass(frozen=True, kw_only=True)
class PlaceFlags:
    """Where it runs, and with --on slurm what the job asks for."""

    on: Literal["local", "slurm"] = "local"
    """On this machine, or as a job of SLURM: the same command follows a job that is there."""
    partition: str | None = None
    """SLURM: where to run."""
    account: str | None = None
    """SLURM: whom to charge."""
    time: str | None = None
    """SLURM: how long the job may run, such as 4:00:00."""
    mem: str | None = None
    """SLURM: memory of each node, such as 64G."""
    cpus_per_node: int | None = None
    """SLURM: CPU cores of each node."""
    slurm_arg: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """SLURM: NAME=VALUE, one more option of sbatch. May be given several times."""
    no_wait: Switch = False
    """SLURM: print the job's id and leave, instead of showing what rank 0 prints."""


@dataclass(frozen=True, kw_only=True)
class GangRunFlags(ShownFlags):
    """Where logs go and what is shown."""

    run_dir: Annotated[Path | None, tyro.conf.arg(aliases=["--save-dir"])] = None
    """The run folder. Default: runs/<name>-<time>."""
    all_ranks: Switch = False
    """Show what every rank prints, not only rank 0."""


def gang_options_from(
    device: DeviceFlags,
    gang: GangFlags,
    node: NodeFlags,
    place: PlaceFlags | None = None,
    earlier: EarlierWorkFlags | None = None,
) -> GangOptions:
    """The options these flags mean; UsageError where two of them contradict each other.

    ``place``: None for a command that always runs here; ``earlier``: for one that keeps nothing.
    """
    earlier = earlier or EarlierWorkFlags()
    slurm = None if place is None else slurm_request_from(place, device, gang, node)
    devices, gpu_ids, max_gpus = chosen_devices(device)
    if node.min_nodes is not None and not gang.max_restarts:
        raise UsageError(
            f"--min-nodes {node.min_nodes} has no effect without restarts.",
            hint="add --max-restarts 3.",
        )
    met = read_meeting() if slurm is None and node.nodes > 1 else Meeting()
    node_rank = met.node_rank if node.node_rank is None else node.node_rank
    return GangOptions(
        devices=devices or _D.devices,
        gpu_ids=gpu_ids,
        max_gpus=max_gpus,
        num_ranks=gang.nproc_per_node,
        force=device.force,
        max_restarts=gang.max_restarts,
        stall_timeout_s=parse_duration(gang.stall_timeout, "--stall-timeout"),
        grace_s=parse_duration(gang.grace, "--grace"),
        monitor_interval_s=parse_duration(gang.monitor_interval, "--monitor-interval"),
        start=None if gang.start == "auto" else gang.start,
        num_nodes=1 if slurm is not None else node.nodes,
        min_nodes=node.min_nodes,
        node_rank=node_rank or 0,
        master_addr=node.master_addr or met.master_addr,
        master_port=met.master_port if node.master_port is None else node.master_port,
        slurm=slurm,
        allow_changed_code=earlier.allow_changed_code,
        restart=earlier.restart,
    )


def slurm_request_from(
    place: PlaceFlags, device: DeviceFlags, gang: GangFlags, node: NodeFlags
) -> JobRequest | None:
    """What the job asks for, None for --on local; UsageError for flags without effect there."""
    if place.on == "local":
        _refuse_given(vars(place), PlaceFlags(), "local", "add --on slurm, or drop it.")
        return None
    told = {"min_nodes", "node_rank", "master_addr", "master_port"}
    of_nodes = {name: value for name, value in vars(node).items() if name in told}
    _refuse_given(of_nodes, NodeFlags(), "slurm", "drop it: the job's nodes find each other.")
    num_gpus, num_cpus = _of_each_node(device, gang)
    return JobRequest(
        num_nodes=node.nodes,
        gpus_per_node=num_gpus,
        cpus_per_node=num_cpus if place.cpus_per_node is None else place.cpus_per_node,
        memory=place.mem,
        time_limit=place.time,
        partition=place.partition,
        account=place.account,
        slurm_args=place.slurm_arg,
        warn_before_s=gang_warning_s(parse_duration(gang.grace, "--grace")),
    )


def _refuse_given(values: dict[str, Any], defaults: object, place: str, hint: str) -> None:
    for name, value in values.items():
        if name != "on" and value != getattr(defaults, name):
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag} has no effect with --on {place}.", hint=hint)


def _of_each_node(device: DeviceFlags, gang: GangFlags) -> tuple[int, int | None]:
    """GPUs and cores that each node must give, for one rank each."""
    devices, gpu_ids, max_gpus = chosen_devices(device)
    words = (devices or "").strip()
    if words.isdecimal() and int(words) > 0:
        return int(words), None
    if words == "cpu" or (words.startswith("cpu:") and words[4:].isdecimal()):
        return 0, int(words.partition(":")[2] or 1)
    chosen = gpu_ids or words or (None if max_gpus is None else f"at most {max_gpus} GPUs")
    if gang.nproc_per_node is not None:
        chosen = f"--nproc-per-node {gang.nproc_per_node}"
    raise UsageError(
        "With --on slurm the number of GPUs of each node must be said"
        + (f", not {chosen}: SLURM chooses which." if chosen else "."),
        hint="add --gpus 4, or --devices cpu:8 for ranks on the CPU.",
    )
