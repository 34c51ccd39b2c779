"""What Ray is told of each host of a run: its GPUs, cores, and how many workers fit; and the ports
through which hosts reach each other over the SSH connections of this machine.

All of Ray listens on 127.0.0.1 then, on ports of which no two hosts have the same: what another
host means by 127.0.0.1:PORT is forwarded to this machine, and from here to the host whose port it
is. An sshd forwards so by its defaults. See docs/decisions/0057-ray-through-ssh.md.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from muster.base.errors import SetupError, UsageError
from muster.base.shown_text import count
from muster.farm.executors.cluster import ClusterRequest
from muster.hosts.connection import Connection
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


ADDRESS = "127.0.0.1"
#: Below those that systems give to whoever asks for any.
_LOWEST, _HIGHEST = 20_000, 32_000
_TRIES = 30
#: Workers of Ray's beside ours: those that follow one that is lost, and those that spill objects.
_SPARE = 4


@dataclass(frozen=True)
class Ports:
    """Where Ray listens on one host. ``store``: that of its head's control store, there alone."""

    manager: int
    objects: int
    workers: tuple[int, ...]
    store: int | None = None

    @property
    def all(self) -> tuple[int, ...]:
        head = () if self.store is None else (self.store,)
        return (self.manager, self.objects, *self.workers, *head)

    def settings(self) -> dict[str, int | str]:
        """Ray's own (``RayParams``)."""
        found: dict[str, int | str] = {
            "node_manager_port": self.manager, "object_manager_port": self.objects,
            "worker_port_list": ",".join(map(str, self.workers)),
        }  # fmt: skip
        if self.store is not None:
            found["gcs_server_port"] = self.store
        return found


def share_out(first: int, workers: Mapping[str, int], head: str) -> dict[str, Ports]:
    """Ports from ``first`` on for each host, by its name; ``workers``: how many of ours it has."""
    found = {}
    for name, number in workers.items():
        last = first + 2 + 2 * number + _SPARE
        store = last if name == head else None
        found[name] = Ports(first, first + 1, tuple(range(first + 2, last)), store)
        first = last + 1
    return found


def find_ports(
    connections: Sequence[Connection], workers: Mapping[str, int], head: str
) -> dict[str, Ports]:
    """Ports that are free on all of the hosts, as each listens for all others too."""
    count = sum(len(one.all) for one in share_out(0, workers, head).values()) + len(workers)
    for _ in range(_TRIES):
        first = random.randrange(_LOWEST, _HIGHEST - count)
        if all(one.ask("are_free", ADDRESS, first, count) for one in connections):
            return share_out(first, workers, head)
    raise SetupError(
        f"There are no {count} ports in a row, from {_LOWEST} to {_HIGHEST}, that are free on all "
        "hosts: Ray's connections cannot go through SSH.",
        hint="try again, or use fewer hosts or workers.",
    )


def forwards(name: str, ports: Mapping[str, Ports]) -> tuple[str, ...]:
    """What ssh is told: ports of the host are here as well, and those of all others there."""
    words = []
    for owner, its in ports.items():
        flag = "-L" if owner == name else "-R"
        for port in its.all:
            words += [flag, f"{ADDRESS}:{port}:{ADDRESS}:{port}"]
    return tuple(words)


def check_forwards(connection: Connection, ports: Mapping[str, Ports]) -> None:
    """SetupError where the host does not forward what it was asked to, or where its own ports are
    taken: by what is forwarded to another host, if both are one machine."""
    name = connection.host.name
    if not all(connection.ask("are_free", ADDRESS, port, 1) for port in ports[name].all):
        raise SetupError(
            f"{name} is the same machine as this one or as another host of the run, or a port was "
            "taken there meanwhile: Ray's connections cannot go through SSH.",
            hint="name each machine once, and this one localhost; else try again.",
        )
    check_reached(connection, {owner: its for owner, its in ports.items() if owner != name})


def check_reached(connection: Connection, ports: Mapping[str, Ports]) -> None:
    """SetupError where the host, or this machine, does not reach these ports of other hosts. That
    it is ssh which listens there, ssh itself has seen to: it ends where it cannot."""
    name = connection.host.name
    places = [(ADDRESS, port) for its in ports.values() for port in its.all]
    missing = [why for why in connection.ask("reach", places, limit_s=120.0) if why]
    if missing:
        raise SetupError(
            f"{len(missing)} of {len(places)} ports are not forwarded by {name}: {missing[0]}. "
            "Without them Ray's connections cannot go through SSH.",
            hint=f"allow it in sshd_config on {name} (AllowTcpForwarding yes), or have the hosts "
            "reach each other.",
        )
