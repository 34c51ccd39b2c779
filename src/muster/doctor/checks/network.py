"""How ranks find each other: interfaces, names, the master, clocks; and the all-reduce that was
run."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator

from muster.base.atomic_files import is_remote
from muster.doctor.checks.speed import probe_trouble
from muster.doctor.facts import AllReduce, Facts, Interface, ReduceTry
from muster.doctor.findings import (
    Finding,
    error,
    health_of_torch_device,
    note,
    num_nodes,
    nvlink_gb_s,
    ok,
    pcie_gb_s,
    warning,
)

#: Interfaces that only lead to containers or virtual machines of this host.
_VIRTUAL = ("docker", "virbr", "veth", "br-", "cni", "flannel", "cali", "lxc", "vmnet", "kube")
_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_MOST_SKEW_S = 2.0
_MOST_DISK_SKEW_S = 30.0


def interface_names(facts: Facts) -> Iterator[Finding]:
    """The interfaces named for gloo and NCCL exist and are up."""
    known = {one.name: one for one in facts.network.interfaces}
    for variable in _VARIABLES:
        value = facts.environment.get(variable)
        if value is None or not known:
            continue
        bad = [name for name in _prefixes(value) if not _matching(name, variable, known)]
        if bad and not value.startswith("^"):
            best = _best(facts)
            yield error(
                what=f"{variable}={value}: there is no working interface {', '.join(bad)} here "
                f"({', '.join(sorted(known))}).",
                why="The back-end fails at its start, or waits for an address that never comes.",
                fix=f"{variable}={best}" if best else f"unset {variable}",
                settings={variable: best} if best else {},
            )
        else:
            yield ok(f"{variable}={value} names a working interface.")


def _prefixes(value: str) -> list[str]:
    return [part for part in value.lstrip("^=").split(",") if part]


def _matching(name: str, variable: str, known: dict[str, Interface]) -> bool:
    # NCCL takes the beginning of a name (NCCL documentation), gloo the whole.
    return any(
        one.is_up and (key == name or (variable.startswith("NCCL") and key.startswith(name)))
        for key, one in known.items()
    )


def _best(facts: Facts) -> str | None:
    """The interface to use between hosts: that of the default route, else the first real one."""
    usable = [
        one.name
        for one in facts.network.interfaces
        if one.is_up and not one.is_loopback and one.ipv4 and not one.name.startswith(_VIRTUAL)
    ]
    default = facts.network.default_interface
    return default if default in usable else (usable[0] if usable else None)


def host_name(facts: Facts) -> Iterator[Finding]:
    """This host's name leads to an address that gloo can use."""
    network, several = facts.network, num_nodes(facts.environment) > 1
    best, chosen = _best(facts), facts.environment.get("GLOO_SOCKET_IFNAME")
    if chosen is not None:
        return  # gloo does not ask for the name then
    settings = {"GLOO_SOCKET_IFNAME": best} if best else {"GLOO_SOCKET_IFNAME": "lo"}
    fix = f"export GLOO_SOCKET_IFNAME={settings['GLOO_SOCKET_IFNAME']}"
    if network.host_addresses is None:
        if network.resolve_error is not None:
            yield Finding(
                # gloo has just worked here in spite of it; on several nodes that says nothing.
                severity="note" if _gloo_worked(facts) and not several else "warning",
                what=f"This host's own name, {facts.host.name}, does not resolve: "
                f"{network.resolve_error}.",
                why="gloo looks for its interface by that name; ranks may hang when they meet.",
                fix=f"{fix}, or add the name to /etc/hosts.",
                settings=settings,
            )
        return
    addresses = [ipaddress.ip_address(text.split("%")[0]) for text in network.host_addresses]
    if several and addresses and all(address.is_loopback for address in addresses):
        yield error(
            what=f"{facts.host.name} resolves to {', '.join(network.host_addresses)}, which "
            "other nodes cannot reach.",
            why="gloo tells the others that address, and they wait forever.",
            fix=f"{fix}, or correct /etc/hosts.",
            settings=settings,
        )
    elif addresses and addresses[0].version == 6 and not _has_global_ipv6(facts):
        yield warning(
            what=f"{facts.host.name} resolves to the IPv6 address {addresses[0]} first, but no "
            "interface has an IPv6 address beyond its own link.",
            why="Ranks may wait for an address that cannot be reached.",
            fix=f"{fix}; the interface's IPv4 address is taken then.",
            settings=settings,
        )
    else:
        yield ok(f"{facts.host.name} resolves to {', '.join(network.host_addresses)}.")


def _gloo_worked(facts: Facts) -> bool:
    found = facts.all_reduce
    if found is None or found.backend != "gloo" or not found.tries:
        return False
    return found.tries[0].run.status == "ok"


def _has_global_ipv6(facts: Facts) -> bool:
    found = [ipaddress.ip_address(text) for one in facts.network.interfaces for text in one.ipv6]
    return any(not (address.is_link_local or address.is_loopback) for address in found)


def interface_choice(facts: Facts) -> Iterator[Finding]:
    """On several nodes NCCL does not choose an interface that leads nowhere."""
    if num_nodes(facts.environment) < 2 or "NCCL_SOCKET_IFNAME" in facts.environment:
        return
    up = [one for one in facts.network.interfaces if one.is_up and one.ipv4 and not one.is_loopback]
    odd = [one.name for one in up if one.name.startswith(_VIRTUAL)]
    # NCCL leaves out docker* and lo itself, and takes ib* first (NCCL documentation).
    others = [name for name in odd if not name.startswith("docker")]
    best = _best(facts)
    if others and best:
        yield warning(
            what=f"Several nodes, and interfaces that lead to this host's own containers: "
            f"{', '.join(others)}.",
            why="NCCL may choose one of them, and the nodes then never meet.",
            fix=f"export NCCL_SOCKET_IFNAME={best}",
            settings={"NCCL_SOCKET_IFNAME": best},
        )
    elif up:
        yield ok(f"Interfaces between nodes: {', '.join(one.name for one in up)}.")


def master(facts: Facts) -> Iterator[Finding]:
    """MASTER_ADDR can be reached, or its port is free where this is the master."""
    found = facts.master
    if found is None:
        return
    place = f"MASTER_ADDR={found.address}" + (f", port {found.port}" if found.port else "")
    if not found.resolved:
        yield error(
            what=f"{place}: the name does not resolve ({found.port_problem}).",
            why="No rank of this node can join.",
            fix="Use the master's address, or a name that every node knows.",
        )
    elif found.is_local and found.port_problem is not None:
        yield error(
            what=f"{place}: this host is the master, but the port is in use "
            f"({found.port_problem}).",
            why="The gang cannot open its store: another run, or a rank left by one, has the port.",
            fix="Choose another MASTER_PORT on all nodes.",
        )
    elif found.is_reachable is False:
        yield error(
            what=f"{place}: no answer from here ({found.port_problem}).",
            why="Ranks of this node would wait for the rendezvous until its time limit.",
            fix="Run `muster doctor` on all nodes at the same time, so that the master listens; "
            "if there is still no answer, a firewall is between them.",
        )
    elif found.is_reachable:
        yield ok(f"{place} " + ("is this host." if found.is_local else "answers."))
    else:
        yield from probe_trouble(found.run, f"Meeting the other nodes at {place}")


def clocks(facts: Facts) -> Iterator[Finding]:
    """Clocks of different hosts agree."""
    found, disk = facts.master, facts.disk
    skew_s = None if found is None else found.clock_skew_s
    if skew_s is not None and abs(skew_s) > _MOST_SKEW_S:
        yield warning(
            what=f"This clock is {abs(skew_s):.1f} s {'ahead of' if skew_s > 0 else 'behind'} the "
            "master's.",
            why="Logs of nodes cannot be put in order, and certificates and leases may seem to "
            "have ended.",
            fix="Start a time service on both (timedatectl set-ntp true).",
        )
        return
    # A local disk stamps with this host's own clock.
    disk_skew_s = disk.clock_skew_s if disk is not None and is_remote(disk.file_system) else None
    if disk_skew_s is not None and abs(disk_skew_s) > _MOST_DISK_SKEW_S:
        yield warning(
            what=f"This clock and that of the disk's server differ by {abs(disk_skew_s):.0f} s.",
            why="Files seem to come from the future or the past, which misleads build tools and "
            "caches.",
            fix="Start a time service (timedatectl set-ntp true).",
        )
        return
    if facts.host.clock_synchronised is False and num_nodes(facts.environment) > 1:
        yield note(
            what="No time service keeps this host's clock.",
            why="Clocks of nodes drift apart.",
            fix="timedatectl set-ntp true",
        )
        return
    if skew_s is not None or disk_skew_s is not None:
        yield ok("Clocks agree.")


#: Of the slowest link's raw rate. Rings reach 70 to 90 % of it for large messages.
_LEAST_LINK = 0.3
#: Through the host's memory each byte crosses PCIe twice and is copied by a processor.
_LEAST_WITHOUT_PEERS = 0.1
_SLOW_SMALL_S = 500e-6


def backends(facts: Facts) -> Iterator[Finding]:
    """torch has the back-ends that gangs use here."""
    torch = facts.torch
    if torch.run.status != "ok" or torch.backends is None:
        return
    if not torch.is_distributed:
        yield error(
            what="This torch was built without torch.distributed.",
            why="No gang of several ranks can run; sweeps can.",
            fix="Install an official build of torch.",
        )
        return
    has_gpu = bool(torch.is_cuda_available) and torch.accelerator == "cuda"
    if has_gpu and "nccl" not in torch.backends:
        yield error(
            what=f"torch has no NCCL ({', '.join(torch.backends)}).",
            why="GPUs cannot exchange gradients at a useful speed.",
            fix="Install an official build of torch for Linux; on Windows use WSL 2.",
        )
        return
    if "gloo" not in torch.backends:
        yield warning(
            what=f"torch has no gloo ({', '.join(torch.backends) or 'no back-end at all'}).",
            why="Ranks on the CPU cannot communicate, and those on GPUs have nothing beside NCCL.",
            fix="Install an official build of torch.",
        )
        return
    version = f", NCCL {torch.nccl_version}" if torch.nccl_version else ""
    without = "" if "mpi" in torch.backends else "; no MPI, which only builds from source have"
    yield ok(f"Back-ends: {', '.join(torch.backends)}{version}{without}.")


def all_reduce(facts: Facts) -> Iterator[Finding]:
    """The ranks' all-reduce ends, and every value is right."""
    found = facts.all_reduce
    if found is None or not found.tries:
        return
    first, last = found.tries[0], found.tries[-1]
    who = f"The all-reduce over {found.num_ranks} ranks ({found.backend})"
    if first.is_good:
        yield ok(f"{who} is right.")
        return
    if first.run.status == "skipped":
        yield from probe_trouble(first.run, who)
        return
    worked = last.settings if last.is_good else {}
    yield error(
        what=f"{who} {_trouble(first)}.",
        why="A gang would hang, fail or learn from wrong gradients in the same way.",
        fix=_advice(found, worked),
        settings=worked,
    )


def _trouble(attempt: ReduceTry) -> str:
    run = attempt.run
    if run.status == "hung":
        return f"hangs{run.where}; it was cut off after {run.seconds:.0f} s"
    if run.status == "failed":
        return f"fails{run.where}: {run.reason}"
    bad = max(attempt.sizes, key=lambda size: size.wrong_values)
    return f"gives wrong values: {bad.wrong_values} of {bad.num_values}"


def _advice(found: AllReduce, worked: dict[str, str]) -> str:
    if worked:
        words = " ".join(f"{name}={value}" for name, value in worked.items())
        return f"With {words} it was right on this machine; --fix env writes that to a file."
    tried = [" ".join(f"{k}={v}" for k, v in one.settings.items())
             for one in found.tries[1:] if one.run.status != "skipped"]  # fmt: skip
    if not tried:
        return "NCCL_DEBUG=INFO makes NCCL say what it does."
    return f"Tried without success: {', '.join(tried)}. NCCL_DEBUG=INFO says what NCCL does."


def all_reduce_speed(facts: Facts) -> Iterator[Finding]:
    """Large messages go at the speed of the links, small ones without delay."""
    found = facts.all_reduce
    if found is None:
        return
    good = next((one for one in found.tries if one.is_good and one.sizes), None)
    if good is None:
        return
    large = max(good.sizes, key=lambda size: size.num_bytes)
    small = min(good.sizes, key=lambda size: size.num_bytes)
    rate_gb_s = bus_gb_s(large.num_bytes, large.seconds, found.num_ranks)
    figures = (
        f"{rate_gb_s:.3g} GB/s for {large.num_bytes >> 20} MiB, {small.seconds * 1e6:.0f} µs for "
        f"{small.num_bytes >> 10} KiB"
    )
    expected = _expected_gb_s(facts, found, good)
    slow = expected is not None and rate_gb_s < expected[0] * expected[1]
    if expected is not None and slow:
        yield warning(
            what=f"All-reduce over {found.num_ranks} GPUs is slow: {figures}; {expected[2]}.",
            why="Every step of a gang exchanges all gradients.",
            fix="NCCL_DEBUG=INFO shows the paths NCCL takes; nvidia-smi topo -m those there are. "
            "In a container, NCCL needs /dev/shm and --ipc=host.",
        )
    if found.kind != "cpu" and small.seconds > _SLOW_SMALL_S:
        yield note(
            what=f"A small all-reduce takes {small.seconds * 1e6:.0f} µs.",
            why="Models of many small layers wait for that; 20 to 60 µs are usual on one host.",
            fix="Pin processes to cores near their GPU, and leave cores free for NCCL's threads.",
        )
    elif not slow:
        yield ok(f"All-reduce: {figures}.")


def bus_gb_s(num_bytes: int, seconds: float, num_ranks: int) -> float:
    """Bandwidth that each link of a ring sees: 2 (n - 1) / n times the bytes (nccl-tests).

    >>> bus_gb_s(10**9, 1.0, 2)
    1.0
    """
    return 2 * (num_ranks - 1) / num_ranks * num_bytes / seconds / 1e9


def _expected_gb_s(
    facts: Facts, found: AllReduce, good: ReduceTry
) -> tuple[float, float, str] | None:
    """Rate of the weakest link, the least share of it, and both in words."""
    gpus = [health_of_torch_device(facts, number) for number in found.devices]
    known = [gpu for gpu in gpus if gpu is not None]
    if found.kind != "cuda" or not known or len(known) < len(gpus):
        return None
    fast = [nvlink_gb_s(gpu) for gpu in known]
    indices = {gpu.index for gpu in known}
    links = [k for k in facts.links if k.first in indices and k.second in indices]
    if (
        not good.settings
        and all(rate is not None for rate in fast)
        and all(link.is_nvlink for link in links)
    ):
        rate = min(rate for rate in fast if rate is not None)
        return rate, _LEAST_LINK, f"NVLink carries {rate:.0f}"
    lanes = [pcie_gb_s(gpu.pcie_generation_max, gpu.pcie_width) for gpu in known]
    slowest = min((rate for rate in lanes if rate is not None), default=None)
    if slowest is None:
        return None
    # A repair may have switched peer access off.
    has_peers = bool(links) and not good.settings and all(link.peer_read == "ok" for link in links)
    share = _LEAST_LINK if has_peers else _LEAST_WITHOUT_PEERS
    return slowest, share, f"the slowest PCIe link carries {slowest:.0f}"
