"""Whether hosts can work together: what each one has, and whom it reaches, with what repairs it."""

from __future__ import annotations

import contextlib
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from importlib import metadata
from types import MappingProxyType
from typing import Any, Literal

from muster.base.errors import SetupError
from muster.hosts.connection import Circle, Connection, Way
from muster.hosts.far_end import muster_code
from muster.hosts.names import Host

#: From here on clocks are said to differ.
SKEW_S = 2.0
_DISK_MIB = 5 << 10
#: Ray's logs and sockets alone take so much.
_LEAST_MIB = 64
_SLOW_BYTES_PER_S, _FAR_S = 1 << 20, 0.2
#: Ray replaces 127.0.0.1 by an outer address of the machine.
_LOOPBACK = "127.0.0.2"
_NOTHING: Mapping[str, Mapping[str, Any]] = MappingProxyType({})
_SAME_CODE = "install the same there as here, from the same commit."


@dataclass(frozen=True)
class Finding:
    """``state``: a failure keeps the host from being used. ``fix``: empty where all is well."""

    what: str
    state: Literal["ok", "warning", "failure"]
    found: str
    fix: str = ""


def connect_all(
    ways: Sequence[tuple[Host, Way]],
    facts: Mapping[str, Mapping[str, Any]] = _NOTHING,
    on_failure: Callable[[SetupError], None] = lambda error: None,
) -> list[Connection | SetupError]:
    """A connection to each, or why there is none; all at once. ``facts``: what is known by name;
    ``on_failure``: is told each failure when it happens, in a thread of its own."""

    def connect(pair: tuple[Host, Way]) -> Connection | SetupError:
        try:
            return Connection(*pair, facts.get(pair[0].name))
        except SetupError as error:
            error.host = pair[0].name
            on_failure(error)
            return error

    with ThreadPoolExecutor(max(1, len(ways))) as pool:
        try:
            return list(pool.map(connect, ways))
        except BaseException:  # Ctrl-C: the pool waits for its threads
            for _, way in ways:
                way.circle.end()
            raise


def open_all(
    ways: Sequence[tuple[Host, Way]], facts: Mapping[str, Mapping[str, Any]] = _NOTHING
) -> list[Connection]:
    """A connection to each. Raises SetupError with the first failure, as soon as it happens; then
    none is left open."""
    failures: list[SetupError] = []
    # A circle of their own: the same way may be tried again.
    these = Circle()
    for circle in {way.circle for _, way in ways}:
        circle.add(these)

    def fail(error: SetupError) -> None:
        failures.append(error)
        these.end()  # what the others would come to does not matter any more

    found = connect_all([(host, replace(way, circle=these)) for host, way in ways], facts, fail)
    connections = [one for one in found if isinstance(one, Connection)]
    if failures:
        close_all(connections)
        raise failures[0]
    return connections


@contextlib.contextmanager
def connected(hosts: Sequence[Host], way: Way | None = None) -> Iterator[list[Connection]]:
    """Connections to all of them, closed at the end. Raises SetupError with the first failure."""
    way = way or Way()
    connections = open_all([(host, way) for host in hosts])
    try:
        yield connections
    finally:
        close_all(connections)


def close_all(connections: Sequence[Connection]) -> None:
    """Close them at once; each may take a moment to end what it has started."""
    if connections:
        with ThreadPoolExecutor(len(connections)) as pool:
            list(pool.map(Connection.close, connections))


@cache
def here() -> Mapping[str, str | None]:
    """The versions of this machine, which those of hosts are compared with."""

    def version(name: str) -> str | None:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return None

    return {
        "python_version": ".".join(map(str, sys.version_info[:3])),
        "muster": version("muster-gpu"),
        "ray": version("ray"),
        "torch": version("torch"),
        "muster_code": muster_code(),
    }


def other_code(host: Host, facts: Mapping[str, Any]) -> str:
    """That a host has other code of Muster's under the same version; "" where it has not."""
    if facts.get("muster_code") == here()["muster_code"]:
        return ""
    return (
        f"{host.name} has other code of Muster {facts['muster']} than this machine, and may do "
        f"other things with it: {_SAME_CODE}"
    )


def judge(
    host: Host, facts: Mapping[str, Any], here: Mapping[str, str | None]
) -> Iterator[Finding]:
    """What a host's facts say of it. ``here``: the versions of this machine. ``muster_code``, in
    both or in neither, tells two checkouts of one version apart.
    """
    python = facts["python"]
    ours, theirs = str(here["python_version"]), str(facts["python_version"])
    if ours.split(".")[:2] == theirs.split(".")[:2]:
        yield Finding("python", "ok", theirs)
    else:
        wanted = ".".join(ours.split(".")[:2])
        fix = f"use Python {wanted} there, as here, and name it: --hosts-python PATH."
        yield Finding("python", "failure", f"{theirs} ({python}); here it is {ours}", fix)
    for name, package in (("muster", "muster-gpu"), ("ray", "ray")):
        wanted_version, version = here[name], facts[name]
        is_same = facts.get("muster_code") == here.get("muster_code")
        if name == "muster" and version == wanted_version and not is_same:
            yield Finding(name, "warning", f"{version}, but other code than here", _SAME_CODE)
        elif version == wanted_version is not None:
            yield Finding(name, "ok", version)
        elif wanted_version is None:
            fix = "pip install 'muster-gpu[ray]'"
            yield Finding(name, "failure", "not installed on this machine", fix)
        else:
            fix = f"on {host.name}: {python} -m pip install '{package}=={wanted_version}'"
            found = f"{version or 'not installed'}; here it is {wanted_version}"
            yield Finding(name, "failure", found, fix)
    if facts["torch"] == here["torch"] or here["torch"] is None:
        yield Finding("torch", "ok", facts["torch"] or "not installed")
    else:
        fix = f"install torch {here['torch']} there, unless your tasks do without or with another."
        found = f"{facts['torch'] or 'not installed'}; here it is {here['torch']}"
        yield Finding("torch", "warning", found, fix)
    yield _gpus(host, facts)
    skew = facts.get("skew_s", 0.0)
    if abs(skew) <= SKEW_S:
        yield Finding("clock", "ok", f"{skew:+.2f} s")
    else:
        fix = "switch on its time service: timedatectl set-ntp true"
        yield Finding("clock", "warning", f"{skew:+.2f} s; times in logs will not agree", fix)
    yield _disk("disk", facts["temp_dir"], facts["disk_free_mib"])
    cache = facts["cache"]
    if cache["lacks"]:
        fix = (
            "trainings and programs begin nothing there without: make it writable, or name another "
            "place with --setup 'export XDG_CACHE_HOME=…'"
        )
        yield Finding("cache", "warning", f"{cache['lacks']} cannot be written to", fix)
    else:
        yield _disk("cache", cache["place"], cache["free_mib"])


def _disk(what: str, place: str, free_mib: int) -> Finding:
    free = f"{free_mib / 1024:.1f} GiB free in {place}"
    if free_mib >= _DISK_MIB:
        return Finding(what, "ok", free)
    fix = "make room there: code, files and Ray's objects pass through it."
    if what == "cache":
        fix = "make room there: code and checkpoints of trainings and programs pass through it."
    is_full = what == "disk" and free_mib < _LEAST_MIB
    return Finding(what, "failure" if is_full else "warning", free, fix)


def _gpus(host: Host, facts: Mapping[str, Any]) -> Finding:
    gpus = facts["gpus"]
    shown = ", ".join(f"{gpu['index']}: {gpu['name']}" for gpu in gpus)
    found = f"{shown}; driver {facts['driver']}" if gpus else "none"
    if facts["gpu_problem"]:
        fix = "repair the driver there; `nvidia-smi` on the host says more."
        return Finding("GPUs", "failure" if host.cpu_workers is None else "warning",
                       facts["gpu_problem"], fix)  # fmt: skip
    missing = sorted(set(host.gpus or ()) - {gpu["index"] for gpu in gpus})
    if missing:
        fix = f"name GPUs that it has, or write {host.name} alone for all of them."
        return Finding("GPUs", "failure", f"no GPU {', '.join(map(str, missing))}: {found}", fix)
    held = {gpu["index"]: gpu["held"] for gpu in gpus if gpu.get("held")}
    wanted = host.gpus or ()
    if held and host.cpu_workers is None:
        told = "; ".join(f"GPU {index} is {who}" for index, who in held.items())
        is_in_vain = len(held) == len(gpus) or not held.keys().isdisjoint(wanted)
        state: Literal["warning", "failure"] = "failure" if is_in_vain else "warning"
        fix = f"wait until it ends (`muster queue` on {host.name} shows it), or name others."
        return Finding("GPUs", state, told, fix)
    return Finding("GPUs", "ok", found)


def measure(connection: Connection) -> Iterator[Finding]:
    """Latency (median of five) and bandwidth to the host, through the SSH connection."""
    times = []
    for _ in range(5):
        began = time.perf_counter()
        connection.ask("echo")
        times.append(time.perf_counter() - began)
    latency = statistics.median(times)
    state: Literal["ok", "warning"] = "ok" if latency < _FAR_S else "warning"
    fix = "" if state == "ok" else "give each task more work: every result crosses the link."
    yield Finding("latency", state, f"{latency * 1e3:.1f} ms", fix)
    rate = _rate(connection, 1 << 18, latency)
    if rate > 8 << 20:
        rate = _rate(connection, 1 << 24, latency)
    state = "ok" if rate > _SLOW_BYTES_PER_S else "warning"
    fix = "" if state == "ok" else "keep code, inputs and checkpoints small: they cross the link."
    yield Finding("bandwidth", state, f"{rate / 1e6:.1f} MB/s", fix)


def _rate(connection: Connection, size: int, latency: float) -> float:
    began = time.perf_counter()
    connection.ask("swallow", size, after=bytes(size), limit_s=120.0)
    return size / max(1e-4, time.perf_counter() - began - latency)


def clock_skew_s(connection: Connection) -> float:
    """How far its clock is ahead of this one, to within half a round trip."""
    before = time.time()
    theirs = float(connection.ask("time"))
    return theirs - (before + time.time()) / 2


@dataclass(frozen=True)
class Links:
    """``head``: an address of this machine that every host reaches; None where there is none.

    ``addresses``: of each host, by its name. ``broken``: (from, to, why).
    """

    head: str | None
    addresses: Mapping[str, str]
    broken: Sequence[tuple[str, str, str]]


def try_links(connections: Sequence[Connection]) -> Links:
    """Find by trying how this machine and the hosts reach each other, in all directions."""
    far = [one for one in connections if not one.host.is_local]
    peers = [_usable(one.facts["peer"]) for one in far]
    head, reasons = None, []
    for candidate in dict.fromkeys(peers or [_LOOPBACK]):
        reasons = _from_hosts(far, candidate)
        if not reasons:
            head = candidate
            break
    broken = [(name, "here", why) for name, why in reasons]
    addresses = {one.host.name: _usable(one.facts["address"]) for one in far}
    places = {}
    for one in far:
        address = addresses[one.host.name]
        try:
            places[one.host.name] = (address, one.ask("listen", address))
        except SetupError as error:
            broken.append(
                (one.host.name, "itself", f"{address} is not one of its addresses: {error}")
            )
            continue
        try:
            socket.create_connection(places[one.host.name], timeout=3).close()
        except OSError as error:
            broken.append(("here", one.host.name, error.strerror or str(error)))

    def reached(one: Connection) -> list[tuple[str, str, str]]:
        others = {name: place for name, place in places.items() if name != one.host.name}
        answers = one.ask("reach", list(others.values()), limit_s=30.0 + 3 * len(others))
        return [(one.host.name, n, why) for n, why in zip(others, answers, strict=True) if why]

    if len(places) > 1:
        with ThreadPoolExecutor(len(far)) as pool:  # some are far away
            broken += [link for links in pool.map(reached, far) for link in links]
    return Links(head, addresses, broken)


def how_to_link(broken: tuple[str, str, str]) -> str:
    """What repairs a link."""
    _, to, _ = broken
    where = "this machine" if to == "here" else to
    return (
        f"open the TCP ports of {where} to the others (in ufw: ufw allow from ADDRESS), or start "
        "the command on a machine in the network of all hosts; a jump host or NAT between them "
        "does not work."
    )


def _from_hosts(far: Sequence[Connection], address: str) -> list[tuple[str, str]]:
    try:
        server = socket.create_server((address, 0))
    except OSError as error:
        why = f"they see this machine as {address}, which is not its own ({error.strerror})"
        return [(one.host.name, why) for one in far]
    with server:
        place = server.getsockname()[:2]
        answers = [(one.host.name, one.ask("reach", [place])[0]) for one in far]
    return [(name, f"{place[0]}: {why}") for name, why in answers if why]


def _usable(address: str) -> str:
    return _LOOPBACK if address in ("127.0.0.1", "") else address
