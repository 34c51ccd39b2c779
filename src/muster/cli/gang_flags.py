"""The flags of commands that start a gang, and how they become options."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from muster.api.gangs import GangOptions
from muster.api.options import parse_duration
from muster.base.errors import UsageError
from muster.cli.flags import DeviceFlags, Switch, chosen_devices

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
    node_rank: int = _D.node_rank
    """Which node this is, from 0."""
    master_addr: str | None = None
    """Where node 0 is."""
    master_port: int | None = None
    """A free port there; the same on all nodes."""


@dataclass(frozen=True, kw_only=True)
class GangRunFlags:
    """Where logs go and what is shown."""

    run_dir: Annotated[Path | None, tyro.conf.arg(aliases=["--save-dir"])] = None
    """The run folder. Default: runs/<name>-<time>."""
    all_ranks: Switch = False
    """Show what every rank prints, not only rank 0."""
    quiet: Switch = False
    """Show nothing but errors."""
    json: Switch = False
    """Print the outcome as JSON and nothing else."""
    dry_run: Switch = False
    """Show what would run, where, and start nothing."""


def gang_options_from(device: DeviceFlags, gang: GangFlags, node: NodeFlags) -> GangOptions:
    """The options these flags mean; UsageError where two of them contradict each other."""
    devices, gpu_ids, max_gpus = chosen_devices(device)
    if node.min_nodes is not None and not gang.max_restarts:
        raise UsageError(
            f"--min-nodes {node.min_nodes} has no effect without restarts.",
            hint="add --max-restarts 3.",
        )
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
        num_nodes=node.nodes,
        min_nodes=node.min_nodes,
        node_rank=node.node_rank,
        master_addr=node.master_addr,
        master_port=node.master_port,
    )
