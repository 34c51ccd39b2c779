"""What Ray is told of each host of a run: its GPUs, cores, and how many workers fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from muster.base.errors import UsageError
from muster.base.shown_text import count
from muster.farm.executors.cluster import ClusterRequest
from muster.hosts.names import LOCAL, Host


@dataclass(frozen=True)
class Node:
    """What Ray is told of a host. ``gpus``: by their numbers there. ``memory_mib``: None where Ray
    is to find out."""

    host: Host
    gpus: tuple[int, ...]
    cpus: int
    workers: int
    memory_mib: int | None = None

    @property
    def shown(self) -> str:
        """For ``--dry-run``: what is started there."""
        if not self.workers:
            return f"{self.host.name}: nothing, as it has too little for a worker"
        if not self.gpus:
            return f"{self.host.name}: {count(self.workers, 'worker')} on its CPU"
        gpus = ", ".join(map(str, self.gpus))
        which = "GPU" if len(self.gpus) == 1 else "GPUs"
        return f"{self.host.name}: {count(self.workers, 'worker')} on {which} {gpus}"


NO_WORKERS = Node(Host(LOCAL), (), 0, 0)


def plan_nodes(
    request: ClusterRequest, hosts: Sequence[Host], facts: Sequence[Mapping[str, Any]]
) -> tuple[ClusterRequest, list[Node]]:
    """The request with as many workers as fit, and what each host gets.

    Raises UsageError where hosts would have unlike workers.
    """
    cores = request.cores_per_actor
    chosen = [_gpus_of(host, about) for host, about in zip(hosts, facts, strict=True)]
    if any(chosen) and not all(chosen):
        without = [host.name for host, gpus in zip(hosts, chosen, strict=True) if not gpus]
        raise UsageError(
            f"{', '.join(without)} would work without a GPU and the other hosts with one: the "
            "workers of a run must be alike.",
            hint=f"leave out {', '.join(without)}, or use the CPU everywhere (HOST:cpu:N).",
        )
    each = (request.gpus_per_worker or 1.0) if any(chosen) else 0.0
    if request.gpus_per_worker and not any(chosen):
        raise UsageError(
            f"--gpus-per-worker {request.gpus_per_worker:g}: no host gives a GPU.",
            hint="drop it, or name hosts with GPUs.",
        )
    nodes = []
    for host, gpus, about in zip(hosts, chosen, facts, strict=True):
        if gpus:
            workers = int(len(gpus) / each) if each >= 1 else len(gpus) * int(1 / each + 1e-6)
            # A GPU does not stay idle because cores are few, unless somebody asks for them.
            if request.cpus_per_worker is not None:
                workers = min(workers, int(about["cpus"]) // cores)
        else:
            workers = host.cpu_workers or 1
        memory = about.get("memory_mib") if request.memory_bytes else None
        if memory is not None:
            workers = min(workers, (memory << 20) // request.memory_bytes)
        if gpus:  # those that get no worker are left to others
            gpus = gpus[: workers * int(each) if each >= 1 else -(-workers // int(1 / each + 1e-6))]
        # No more cores than that: Ray starts a process for each ahead of time.
        nodes.append(Node(host, gpus, workers * cores, workers, memory))
    total = sum(node.workers for node in nodes)
    if not total:
        raise UsageError(
            "No worker fits on any of the hosts with this many GPUs and cores, and this much "
            "memory, for each.",
            hint="ask for less with --gpus-per-worker, --cpus-per-worker and --memory.",
        )
    return dataclasses.replace(request, num_workers=total, gpus_per_worker=each), nodes


def _gpus_of(host: Host, facts: Mapping[str, Any]) -> tuple[int, ...]:
    if host.cpu_workers is not None:
        return ()
    return host.gpus or tuple(gpu["index"] for gpu in facts["gpus"] if not gpu.get("held"))
