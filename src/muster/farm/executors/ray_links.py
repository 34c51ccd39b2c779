"""Ray's connections between hosts that go through the SSH connections of this machine.

All of Ray listens on 127.0.0.1 then, on ports of which no two hosts have the same: what another
host means by 127.0.0.1:PORT is forwarded to this machine, and from here to the host whose port it
is. An sshd forwards so by its defaults. On each machine the far end holds the ports of all others
(``far_relay``), so that nobody else can when a connection is lost. See
docs/decisions/0057-ray-through-ssh.md.
"""

from __future__ import annotations

import random
import secrets
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from muster.base.errors import SetupError
from muster.hosts import far_relay
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
    if count > _HIGHEST - _LOWEST:
        raise SetupError(
            f"{sum(workers.values()):,} workers on {len(workers):,} machines take {count:,} ports, "
            f"and Ray's connections through SSH have {_HIGHEST - _LOWEST:,} (from {_LOWEST:,} to "
            f"{_HIGHEST:,}).",
            hint="use fewer hosts or workers, or have the hosts reach each other without SSH.",
        )
    with ThreadPoolExecutor(len(connections)) as pool:  # some are far away
        list(pool.map(lambda one: one.ask("use", far_relay.__name__), connections))
        for _ in range(_TRIES):
            first = random.randrange(_LOWEST, _HIGHEST - count + 1)
            wanted = partial(_are_free, first=first, count=count, is_for_ray=True)
            if all(pool.map(wanted, connections)):
                return share_out(first, workers, head)
    raise SetupError(
        f"There are no {count} ports in a row, from {_LOWEST} to {_HIGHEST}, that are free on all "
        "hosts: Ray's connections cannot go through SSH.",
        hint="try again, or use fewer hosts or workers.",
    )


def _are_free(connection: Connection, first: int, count: int, *, is_for_ray: bool = False) -> bool:
    return bool(connection.ask("are_free", ADDRESS, first, count, is_for_ray))


@dataclass(frozen=True)
class Forwards:
    """Those of one connection to a host. ``mark``: in the names of the sockets that ssh makes at
    both ends; those of an earlier connection may be there still."""

    name: str
    ports: Mapping[str, Ports]
    mark: str = field(default_factory=lambda: secrets.token_hex(6))

    @property
    def words(self) -> tuple[str, ...]:
        """What ssh is told."""
        words: list[str] = []
        for flag, places in (("-L", self.near), ("-R", self.far)):
            for port, place in places.items():
                words += [flag, f"{place}:{ADDRESS}:{port}"]
        return tuple(words)

    @property
    def near(self) -> dict[int, str]:
        """The ports of the host, with the sockets here that lead there."""
        return self._places(self.ports[self.name])

    @property
    def far(self) -> dict[int, str]:
        """The ports of all others, with the sockets there that lead here."""
        found: dict[int, str] = {}
        for name, its in self.ports.items():
            if name != self.name:
                found |= self._places(its)
        return found

    def _places(self, ports: Ports) -> dict[int, str]:
        home = far_relay.HOME / far_relay.NAME
        return {port: f"{home}{self.mark}-{port}" for port in ports.all}


def hold(here: Connection, ports: Mapping[str, Ports], head: str) -> None:
    """Have this machine hold the ports of all hosts but its own. SetupError where one is taken."""
    far = [port for name, its in ports.items() if name != head for port in its.all]
    _lead(here, dict.fromkeys(far, ""))


def connect(
    connection: Connection, here: Connection, forwards: Forwards, leading: threading.Lock
) -> None:
    """Lead the ports of the host there, and at the host those of all others here.

    ``leading``: held while this machine is asked. SetupError where the host does not forward what
    it was asked to, or where its own ports are taken: by what is led to another host, if both are
    one machine.
    """
    name, own = forwards.name, [*forwards.near]
    connection.ask("use", far_relay.__name__)
    if not _are_free(connection, own[0], len(own)):  # they are in a row
        raise SetupError(
            f"{name} is the same machine as this one or as another host of the run, or a port was "
            "taken there meanwhile: Ray's connections cannot go through SSH.",
            hint="name each machine once, and this one localhost; else try again.",
        )
    _lead(connection, forwards.far)
    connection.ask("answer", ADDRESS, own[0])
    with leading:  # connections are for one thread at a time
        _lead(here, forwards.near)
        is_heard = here.ask("hear", ADDRESS, own[0], limit_s=150.0)
    if not is_heard:
        raise SetupError(
            f"Ports are not forwarded to {name}. Without that Ray's connections cannot go through "
            "SSH.",
            hint=f"allow it in sshd_config on {name} (AllowTcpForwarding yes), or have the hosts "
            "reach each other.",
        )


def _lead(connection: Connection, places: Mapping[int, str]) -> None:
    if taken := connection.ask("lead", ADDRESS, places):
        raise SetupError(
            f"Another program listens on port {taken[0]} of {connection.host.name}, which Ray's "
            "connections were to go through.",
            hint="try again: other ports are taken then.",
        )
