"""Ray on hosts that are reached by SSH, for as long as one run lasts.

Ray runs below the far end of each connection, also on this machine, so that all of it ends with
this process, however that ends. See docs/decisions/0035-hosts-over-ssh.md.
"""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from muster.base.errors import SetupError, UsageError
from muster.base.shown_text import clean_text, count
from muster.farm.executors.cluster import ClusterRequest
from muster.hosts.check import close_all, connected, here, how_to_link, judge, try_links
from muster.hosts.connection import Connection
from muster.hosts.names import LOCAL, Host, parse_hosts

_START_S = 120.0
_STARTED = "Ray runtime started"


@dataclass(frozen=True)
class Node:
    """What Ray is told of a host. ``gpus``: by their numbers there."""

    host: Host
    gpus: tuple[int, ...]
    cpus: int
    workers: int

    @property
    def shown(self) -> str:
        """For ``--dry-run``: what is started there."""
        if not self.gpus:
            return f"{self.host.name}: {count(self.workers, 'worker')} on its CPU"
        gpus = ", ".join(map(str, self.gpus))
        which = "GPU" if len(self.gpus) == 1 else "GPUs"
        return f"{self.host.name}: {count(self.workers, 'worker')} on {which} {gpus}"


def ask_hosts(request: ClusterRequest) -> tuple[ClusterRequest, list[Node]]:
    """The request with the workers that the hosts have room for, and what each host gets.

    Connects to each of them and starts nothing. Raises SetupError for one that cannot be used.
    """
    hosts = parse_hosts(request.hosts or "")
    return plan_nodes(request, hosts, _facts_of(hosts, request.hosts_python))


@lru_cache(maxsize=4)  # a start asks several times what is to run where
def _facts_of(hosts: tuple[Host, ...], python: str | None) -> list[Mapping[str, Any]]:
    with connected(hosts, python) as connections:
        return [_checked(one) for one in connections]


def plan_nodes(
    request: ClusterRequest, hosts: Sequence[Host], facts: Sequence[Mapping[str, Any]]
) -> tuple[ClusterRequest, list[Node]]:
    """The pure half of ``ask_hosts``. Raises UsageError where hosts would have unlike workers."""
    cores = request.cores_per_actor
    chosen = [_gpus_of(host, about) for host, about in zip(hosts, facts, strict=True)]
    if any(chosen) and not all(chosen):
        without = [host.name for host, gpus in zip(hosts, chosen, strict=True) if not gpus]
        raise UsageError(
            f"{', '.join(without)} would work without a GPU and the other hosts with one: the "
            "workers of a run are alike.",
            hint="leave it out, or use the CPU everywhere (HOST:cpu:N).",
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
            cpus = int(about["cpus"])
            if request.cpus_per_worker is None:
                cpus = max(cpus, workers)
            workers = min(workers, cpus // cores)
        else:
            workers = host.cpu_workers or 1
            cpus = workers * cores
        nodes.append(Node(host, gpus, cpus, workers))
    total = sum(node.workers for node in nodes)
    if not total:
        raise UsageError(
            "No worker fits on any of the hosts with this many GPUs and cores for each.",
            hint="ask for less with --gpus-per-worker and --cpus-per-worker.",
        )
    return dataclasses.replace(request, num_workers=total, gpus_per_worker=each), nodes


def _gpus_of(host: Host, facts: Mapping[str, Any]) -> tuple[int, ...]:
    if host.cpu_workers is not None:
        return ()
    return host.gpus or tuple(gpu["index"] for gpu in facts["gpus"])


def _checked(connection: Connection) -> Mapping[str, Any]:
    for finding in judge(connection.host, connection.facts, here()):
        if finding.state == "failure":
            raise SetupError(
                f"{connection.host.name} cannot be used ({finding.what}: {finding.found}).",
                hint=f"{finding.fix}\n`muster hosts check` says all there is to say.",
            )
    return connection.facts


class RayHosts:
    """Ray on all hosts from construction to ``close``; ``address`` is that of its head, here.

    Raises SetupError where a host cannot be used; nothing is left then.
    """

    def __init__(self, request: ClusterRequest, token: str) -> None:
        hosts = parse_hosts(request.hosts or "")
        self._head: Connection | None = None
        self._far: list[Connection] = []
        with connected(hosts, request.hosts_python) as connections:
            _, nodes = plan_nodes(request, hosts, [_checked(one) for one in connections])
            links = try_links(connections)
            if links.broken or links.head is None:
                raise SetupError(*_told(links.broken), hint=how_to_link(links.broken[0]))
            try:
                self._start(links.head, links.addresses, nodes, token, request)
            except BaseException:
                self.close()
                raise

    def _start(
        self, head: str, addresses: Mapping[str, str], nodes: Sequence[Node], token: str,
        request: ClusterRequest,
    ) -> None:  # fmt: skip
        with socket.create_server((head, 0)) as server:
            self.address = f"{head}:{server.getsockname()[1]}"
        near = next((node for node in nodes if node.host.is_local), Node(Host(LOCAL), (), 0, 0))
        self._head = Connection(near.host)
        port = self.address.rpartition(":")[2]
        words = ["--head", f"--port={port}", "--include-dashboard=false"]
        _start_node(self._head, near, head, words, token)
        others = [node for node in nodes if not node.host.is_local]
        if not others:
            return

        def join(node: Node) -> Connection | SetupError:
            try:
                connection = Connection(node.host, request.hosts_python)
            except SetupError as error:
                return error
            try:
                place = addresses[node.host.name]
                _start_node(connection, node, place, [f"--address={self.address}"], token)
            except BaseException as error:
                connection.close()
                if isinstance(error, SetupError):
                    return error
                raise
            return connection

        with ThreadPoolExecutor(len(others)) as pool:
            found = list(pool.map(join, others))
        self._far = [one for one in found if isinstance(one, Connection)]
        for one in found:
            if isinstance(one, SetupError):
                raise one

    def close(self) -> None:
        """End Ray everywhere; the hosts before the head, on which they would wait."""
        close_all(self._far)
        if self._head is not None:
            self._head.close()


def _told(broken: Sequence[tuple[str, str, str]]) -> tuple[str]:
    shown = "; ".join(f"{a} does not reach {b} ({clean_text(why)})" for a, b, why in broken[:4])
    return (f"The hosts cannot work together: {shown}.",)


def _start_node(
    connection: Connection, node: Node, address: str, words: Sequence[str], token: str
) -> None:
    argv = [
        connection.facts["python"], "-m", "ray.scripts.scripts", "start", "--block", *words,
        f"--node-ip-address={address}", f"--num-cpus={node.cpus}", f"--num-gpus={len(node.gpus)}",
        "--temp-dir={folder}/r", "--disable-usage-stats",
    ]  # fmt: skip
    environment = {
        "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": "{folder}/auth_token",
        "RAY_AUTH_TOKEN": "", "RAY_USAGE_STATS_ENABLED": "0", "TMPDIR": "{folder}",
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, node.gpus)),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # the numbers are nvidia-smi's
        "RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL": "minor",
    }  # fmt: skip
    files = {"auth_token": token}
    answer = connection.ask(
        "start", argv, environment, files, _STARTED, _START_S, limit_s=_START_S + 30
    )
    if "error" in answer:
        raise SetupError(
            f"Ray could not be started on {node.host.name}: {clean_text(str(answer['error']))}",
            hint=f"see what `muster hosts check {node.host.name}` says.",
        )
