"""Ray's connections between hosts that go through the SSH connections of this machine.

All of Ray listens on 127.0.0.1 then, on ports of which no two hosts have the same: what another
host means by 127.0.0.1:PORT is forwarded to this machine, and from here to the host whose port it
is. An sshd forwards so by its defaults. See docs/decisions/0057-ray-through-ssh.md.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from muster.base.errors import SetupError
from muster.hosts.connection import Connection

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
    for name, count in workers.items():
        last = first + 2 + 2 * count + _SPARE
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
