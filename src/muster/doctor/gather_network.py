"""Interfaces, what this host's name resolves to, and the master of a gang on several nodes."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from muster.doctor.child import read_answer, run_probe
from muster.doctor.facts import Interface, MasterFacts, NetworkFacts, Run


def gather_network(host_name: str, *, limit_s: float) -> NetworkFacts:
    """What is known of the network of this host; never raises, ends within ``limit_s``."""
    found, run = _resolve(host_name, limit_s)
    error = found.resolve_error
    if run.status == "hung":
        error = f"the resolver gave no answer within {limit_s:.0f} s"
    return replace(
        found,
        interfaces=interfaces(),
        default_interface=default_interface(Path("/proc/net/route")),
        resolve_error=error or run.error,
    )


def _resolve(name: str, limit_s: float) -> tuple[NetworkFacts, Run]:
    outcome = run_probe("network", ["resolve", name], limit_s=limit_s)
    value = {"host_addresses": outcome.value.get("addresses"),
             "resolve_error": outcome.value.get("error")}  # fmt: skip
    return read_answer(replace(outcome, value=value), NetworkFacts())


def interfaces() -> tuple[Interface, ...]:
    """Every interface with its addresses."""
    import psutil

    try:
        addresses, found = psutil.net_if_addrs(), psutil.net_if_stats()
    except OSError:  # no /proc
        return ()

    def of_family(name: str, family: int) -> tuple[str, ...]:
        texts = (one.address for one in addresses.get(name, ()) if one.family == family)
        return tuple(text.partition("%")[0] for text in texts)  # without the scope of IPv6

    return tuple(
        Interface(
            name=name,
            is_up=one.isup,
            is_loopback="loopback" in one.flags.split(","),
            ipv4=of_family(name, socket.AF_INET),
            ipv6=of_family(name, socket.AF_INET6),
            speed_mbit_s=one.speed or None,
        )
        for name, one in sorted(found.items())
    )


def default_interface(table: Path) -> str | None:
    """The interface of the IPv4 default route in ``/proc/net/route``; the lowest metric counts."""
    best: tuple[int, str] | None = None
    with suppress(OSError):
        for line in table.read_text().splitlines()[1:]:
            fields = line.split()
            if len(fields) > 7 and fields[1] == "00000000" and fields[7] == "00000000":
                best = min(best or (1 << 30, ""), (int(fields[6]), fields[0]))
    return best[1] if best else None


def wants_master(environment: Mapping[str, str]) -> bool:
    """Whether the environment names several nodes that meet at MASTER_ADDR."""
    return bool(environment.get("MASTER_ADDR")) and num_nodes(environment) > 1


def num_nodes(environment: Mapping[str, str]) -> int:
    """How many hosts the launcher's variables name; 1 where they do not say."""
    for name in ("NNODES", "GROUP_WORLD_SIZE", "SLURM_STEP_NUM_NODES", "SLURM_NNODES"):
        text = environment.get(name, "")
        if text.isdigit() and int(text) > 0:
            return int(text)
    world, local = environment.get("WORLD_SIZE", ""), environment.get("LOCAL_WORLD_SIZE", "")
    if world.isdigit() and local.isdigit() and int(local) > 0:
        return max(1, -(-int(world) // int(local)))
    return 1


def gather_master(
    environment: Mapping[str, str], network: NetworkFacts, *, limit_s: float, meet_s: float
) -> MasterFacts:
    """Meet the other nodes at MASTER_ADDR for up to ``meet_s``: the doctor runs on all of them.

    On the master it listens at MASTER_PORT; elsewhere it connects there and compares clocks.
    """
    address = environment["MASTER_ADDR"]
    text = environment.get("MASTER_PORT", "")
    port = int(text) if text.isdigit() and 0 < int(text) < 1 << 16 else None
    found, run = _resolve(address, limit_s)
    resolved = found.host_addresses or ()
    facts = MasterFacts(run=run, address=address, port=port, resolved=resolved)
    if not resolved:
        problem = found.resolve_error or run.error or "the resolver gave no answer"
        return replace(facts, is_reachable=False, port_problem=problem)
    is_local = is_own_address(resolved, network)
    facts = replace(facts, is_local=is_local)
    if port is None:
        return facts
    words = ["serve" if is_local else "join", address, str(port), str(meet_s)]
    meeting = run_probe("network", words, limit_s=meet_s + limit_s)
    met, run = read_answer(meeting, MasterFacts(), ignore_unknown=True)
    return replace(
        facts,
        run=Run(status=run.status, seconds=run.seconds, error=run.error),
        is_reachable=met.is_reachable,
        port_problem=met.port_problem,
        clock_skew_s=met.clock_skew_s,
        round_trip_s=met.round_trip_s,
    )


def is_own_address(addresses: tuple[str, ...], network: NetworkFacts) -> bool:
    """Whether one of ``addresses`` belongs to an interface of this host."""
    own = {at for one in network.interfaces for at in (*one.ipv4, *one.ipv6)}
    return any(at in own or at.startswith("127.") or at == "::1" for at in addresses)
