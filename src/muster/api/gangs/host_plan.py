"""What a gang would start on which host: they are asked, and nothing is changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from muster.api.gangs.work import GangWork, choose_start
from muster.api.start.options import GangOptions
from muster.base.errors import SetupError, UsageError
from muster.base.shown_text import count
from muster.gang.spec import Start
from muster.hosts.check import connected, here, judge, other_code
from muster.hosts.connection import Connection, Way
from muster.hosts.names import Host, parse_hosts
from muster.run.folder import RunFolder


@dataclass(frozen=True, kw_only=True)
class HostRanks:
    """What a host does: so many ranks, on these GPUs (by their numbers there) or on its CPU."""

    host: Host
    gpus: tuple[int, ...]
    num_ranks: int
    cpus: int

    @property
    def as_planned(self) -> Host:
        """The host with the GPUs that are its in this run, also where ``--hosts`` names none."""
        return replace(self.host, gpus=self.gpus or None)

    @property
    def labels(self) -> list[str]:
        name = self.host.name
        if self.gpus:
            return [f"{name}:{gpu}" for gpu in self.gpus]
        return [f"{name}:cpu:{number}" for number in range(self.num_ranks)]

    @property
    def threads_per_rank(self) -> int:
        return max(1, self.cpus // self.num_ranks)

    @property
    def shown(self) -> str:
        ranks = count(self.num_ranks, "rank")
        if not self.gpus:
            return f"{self.host.name}: {ranks} on its CPU"
        which = "GPU" if len(self.gpus) == 1 else "GPUs"
        return f"{self.host.name}: {ranks} on {which} {', '.join(map(str, self.gpus))}"

    @property
    def said(self) -> str:
        """The host as ``--hosts`` has it."""
        if self.host.cpu_workers is not None:
            return f"{self.host.name}:cpu:{self.host.cpu_workers}"
        chosen = "+".join(map(str, self.host.gpus or ()))
        return f"{self.host.name}:{chosen}" if chosen else self.host.name


@dataclass(frozen=True, kw_only=True)
class HostsPlan:
    """What would be started on which host: ``--dry-run`` shows it."""

    folder: RunFolder
    nodes: tuple[HostRanks, ...]
    start: Start
    notes: tuple[str, ...] = ()

    @property
    def ranks(self) -> list[str]:
        return [label for node in self.nodes for label in node.labels]

    @property
    def threads_per_rank(self) -> int:
        return min(node.threads_per_rank for node in self.nodes)

    @property
    def num_nodes(self) -> int:
        return len(self.nodes)

    def lines(self) -> list[str]:
        return [*(node.shown for node in self.nodes), *self.notes]


def plan_on_hosts(work: GangWork, options: GangOptions) -> HostsPlan:
    """What would be started, where; it changes nothing. SetupError for a host that cannot be used,
    UsageError for hosts of which some have a GPU and some have none."""
    assert options.hosts is not None
    hosts = parse_hosts(options.hosts)
    facts = facts_of(hosts, options.hosts_python, options.hosts_setup, is_forced=options.force)
    unlike = [other_code(*pair) for pair in zip(hosts, facts, strict=True)]
    return HostsPlan(
        folder=work.folder, nodes=plan_hosts(hosts, facts),
        start=choose_start(work.program, options), notes=tuple(filter(None, unlike)),
    )  # fmt: skip


@lru_cache(maxsize=4)
def facts_of(
    hosts: tuple[Host, ...], python: str | None, setup: tuple[str, ...], *, is_forced: bool
) -> list[Mapping[str, Any]]:
    with connected(hosts, Way(python, setup)) as connections:
        return checked(connections, is_forced=is_forced)


def checked(connections: Sequence[Connection], *, is_forced: bool) -> list[Mapping[str, Any]]:
    """Their facts. Raises SetupError for a host that cannot be used, and for unlike versions of
    torch: ranks of two could not talk to each other. ``is_forced``: also GPUs that others hold."""
    first = connections[0]
    found: list[Mapping[str, Any]] = []
    for one in connections:
        facts = dict(one.facts)
        if is_forced:
            facts["gpus"] = [{**gpu, "held": ""} for gpu in facts["gpus"]]
        found.append(facts)
        for finding in judge(one.host, facts, here()):
            # Ray has no part in this, and here torch need not be installed.
            if finding.state == "failure" and finding.what not in ("ray", "torch"):
                error = SetupError(
                    f"{one.host.name} cannot be used ({finding.what}: {finding.found}).",
                    hint=finding.fix,
                )
                error.host = one.host.name
                raise error
        if one.facts["torch"] is None:
            raise SetupError(
                f"{one.host.name} cannot be used: there is no torch for its Python "
                f"{one.facts['python']}.",
                hint=f"on {one.host.name}: {one.facts['python']} -m pip install "
                "'muster-gpu[torch]'",
            )
        if one.facts["torch"].split("+")[0] != first.facts["torch"].split("+")[0]:
            raise SetupError(
                f"{first.host.name} has torch {first.facts['torch']} and {one.host.name} has "
                f"{one.facts['torch']}: ranks of two versions do not understand each other.",
                hint="install the same on all hosts.",
            )
    return found


def plan_hosts(hosts: Sequence[Host], facts: Sequence[Mapping[str, Any]]) -> tuple[HostRanks, ...]:
    """A rank on each GPU, or on the CPU. Raises UsageError where only some would have a GPU."""
    nodes = []
    for host, about in zip(hosts, facts, strict=True):
        gpus: tuple[int, ...] = ()
        if host.cpu_workers is None:
            free = (gpu["index"] for gpu in about["gpus"] if not gpu.get("held"))
            gpus = host.gpus or tuple(free)
        nodes.append(
            HostRanks(
                host=host, gpus=gpus, num_ranks=len(gpus) or host.cpu_workers or 1,
                cpus=int(about["cpus"]),
            )
        )  # fmt: skip
    without = [node.host.name for node in nodes if not node.gpus]
    if 0 < len(without) < len(nodes):
        raise UsageError(
            f"{', '.join(without)} would work without a GPU and the other hosts with one: the "
            "ranks of a gang must be alike.",
            hint=f"leave out {', '.join(without)}, or use the CPU everywhere (HOST:cpu:N).",
        )
    return tuple(nodes)
