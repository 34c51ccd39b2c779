"""What is asked of a cluster: how many workers, and what each of them gets; and what Ray is told of
each host of a run: its GPUs, cores, and how many workers fit. No heavy imports.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from muster.base.errors import UsageError
from muster.base.flags import Flag, check_least, parse_duration
from muster.base.shown_text import count, shown_mib
from muster.farm.task import TargetSpec
from muster.hosts.names import LOCAL, Host, parse_hosts
from muster.slurm.request import (
    CORES_PER_GPU,
    JobRequest,
    SlurmOptions,
    memory_mib,
    setup_of_job,
)

#: Executors whose workers run on machines that an engine hands out; they take no device here.
CLUSTERS = ("slurm", "ray")
#: What Muster's own process in a job takes at most, beside the worker and its task.
_PILOT_MIB = 256
#: Of all mailboxes of a run together, by its coordinator; and as many by its pilots.
_LOOKS_PER_S = 2000
_BOTH, _RAY = ("slurm", "ray"), ("ray",)


def _whole_seconds(text: str, flag: str) -> int:
    return round(parse_duration(text, flag))


@dataclass(frozen=True, kw_only=True)
class ClusterRequest(SlurmOptions):
    """With --on slurm or --on ray: how many workers, and what each gets.

    ``task_memory_mib``: what ``--memory`` allows a task.
    """

    num_workers: Annotated[int, Flag(name="workers", engines=_BOTH)] = 1
    """How many workers."""
    gpus_per_worker: Annotated[float, Flag(metavar="N", engines=_BOTH)] = 0
    """GPUs of each; on Ray also a part of one, such as 0.5, which its workers share."""
    cpus_per_worker: Annotated[int | None, Flag(engines=_BOTH)] = None
    """CPU cores of each. Default: 1, or on SLURM 4 with each GPU."""
    warn_before_s: Annotated[
        int,
        Flag(name="warn-before", metavar="TIME", read=_whole_seconds, engines=("slurm",)),
    ] = 90
    """SLURM: how long before its time limit a worker is warned, so that ctx.checkpoint saves in
    time. Default: 90 seconds."""
    address: Annotated[str | None, Flag(metavar="HOST:PORT", engines=_RAY)] = None
    """Ray: a cluster that runs already; one is started here otherwise."""
    hosts: Annotated[str | None, Flag(metavar="a,b:0-3|@FILE", engines=_RAY)] = None
    """Run on these machines, reached by SSH: Ray is started on them for this run, with a worker on
    each GPU, and ended with it. HOST:0-3 chooses GPUs, HOST:cpu:4 workers on its CPU; localhost is
    this machine. `muster hosts check` says whether they can be used."""
    hosts_python: Annotated[str | None, Flag(metavar="PATH", engines=_RAY)] = None
    """With --hosts: the Python of the hosts that has Muster, if its path differs from the one
    here."""
    hosts_setup: Annotated[tuple[str, ...], Flag(name="setup", metavar="LINE", engines=_BOTH)] = ()
    """With --hosts or --on slurm: a line of bash that each host runs before Python is looked for,
    or each job before its work, such as 'module load cuda'. May be given several times."""
    through_ssh: Annotated[bool, Flag(engines=_RAY)] = False
    """With --hosts: Ray's connections go through SSH also where the hosts reach each other. They
    are encrypted then, and Ray's ports are open to nobody on the network."""
    resources: Annotated[
        tuple[str, ...], Flag(name="resource", metavar="NAME=AMOUNT", engines=_RAY)
    ] = ()
    """Ray: a custom resource of each worker. May be given several times."""
    placement_strategy: Annotated[Literal["DEFAULT", "SPREAD"], Flag(engines=_RAY)] = "DEFAULT"
    """Ray: DEFAULT fills nodes one after another, SPREAD spreads the workers over all nodes."""

    task_memory_mib: Annotated[float | None, Flag(is_hidden=True)] = None

    def __post_init__(self) -> None:
        check_least(self, num_workers=1, gpus_per_worker=0, cpus_per_worker=1, warn_before_s=1)
        _ = self._job(0)
        if self.placement_strategy not in ("DEFAULT", "SPREAD"):
            raise UsageError(
                f"--placement-strategy {self.placement_strategy} is not known.",
                hint="write DEFAULT or SPREAD.",
            )
        if self.gpus_per_worker > 1 and self.gpus_per_worker % 1:
            raise UsageError(
                f"--gpus-per-worker {self.gpus_per_worker:g}: more than one GPU is a whole number.",
                hint="write 1, 2, …; or a part of one GPU, such as 0.5, with --on ray.",
            )
        _ = self.custom_resources
        if self.hosts is not None:
            parse_hosts(self.hosts)
            if self.custom_resources:
                raise UsageError(
                    "--resource has no effect with --hosts: the Ray that is started there has no "
                    "custom resources.",
                    hint="name the hosts that have it.",
                )
            if self.address is not None:
                raise UsageError(
                    "--hosts starts a Ray of its own, and --address names one that runs already.",
                    hint="drop one of them.",
                )
        elif self.hosts_python is not None:
            raise UsageError("--hosts-python has no effect without --hosts.")
        elif self.through_ssh:
            raise UsageError("--through-ssh has no effect without --hosts.")

    def with_memory(self, most_mib: float) -> ClusterRequest:
        """The same for tasks that may hold so much; UsageError where ``--mem`` is less."""
        needs_mib = most_mib + _PILOT_MIB
        if self.memory is not None and 0 < (has_mib := memory_mib(self.memory)) < needs_mib:
            raise UsageError(
                f"--mem {self.memory} gives a worker {shown_mib(has_mib)}, and --memory allows a "
                f"task {shown_mib(most_mib)}, beside {_PILOT_MIB} MiB for Muster's own process.",
                hint="leave --mem out: a job then asks for what its task may take.",
            )
        return dataclasses.replace(self, task_memory_mib=most_mib)

    @property
    def memory_bytes(self) -> int:
        """What is asked of Ray for each worker; 0 where nothing is."""
        return int((self.task_memory_mib or 0) * 2**20)

    @property
    def custom_resources(self) -> dict[str, float]:
        """Amounts of Ray's custom resources by name; UsageError for what cannot be read."""
        found = {}
        for text in self.resources:
            name, _, amount = text.partition("=")
            try:
                found[name] = float(amount or "nan")
            except ValueError:
                found[name] = math.nan
            if not name or not 0 < found[name] < math.inf:
                raise UsageError(
                    f"--resource {text} is not NAME=AMOUNT with an amount greater than 0.",
                    hint="write it as the nodes were started with, such as --resource ssd=1.",
                )
        return found

    @property
    def whole_gpus(self) -> int:
        """The GPUs to ask SLURM for with each worker. Raises UsageError for a part of one."""
        if self.gpus_per_worker % 1:
            raise UsageError(
                f"--gpus-per-worker {self.gpus_per_worker:g}: SLURM gives whole GPUs to a job.",
                hint="write 1; parts of a GPU are for --on ray.",
            )
        return int(self.gpus_per_worker)

    def on_slurm(self) -> JobRequest:
        """What each element of the array asks for; UsageError for a part of a GPU."""
        return self._job(self.whole_gpus)

    def _job(self, num_gpus: int) -> JobRequest:
        asked = {one.name: getattr(self, one.name) for one in dataclasses.fields(SlurmOptions)}
        if self.task_memory_mib is not None and self.memory is None and not self.memory_parts:
            asked["memory"] = f"{math.ceil(self.task_memory_mib) + _PILOT_MIB}M"
        asked["setup_lines"] = (*self.setup_lines, *setup_of_job(self.hosts_setup))
        return JobRequest(
            gpus_per_node=num_gpus,
            cpus_per_node=self.cpus_per_worker,
            warn_before_s=self.warn_before_s,
            **asked,
        )

    @property
    def cores_per_job(self) -> int:
        """The cores to ask SLURM for with each worker: loading data for a GPU takes several."""
        return self.cpus_per_worker or max(1, CORES_PER_GPU * self.whole_gpus)

    @property
    def cores_per_actor(self) -> int:
        """What is asked of Ray for a worker."""
        return self.cpus_per_worker or 1

    def needs_of_pilots(self, targets: Mapping[int, TargetSpec]) -> dict[str, Any]:
        """What must be the same for a coordinator to go on with the pilots of an earlier one."""
        resources = dataclasses.asdict(self)
        del resources["num_workers"]
        return {
            "request": resources,
            "targets": {str(n): dataclasses.asdict(spec) for n, spec in targets.items()},
        }


def look_every_s(num_workers: int) -> float:
    """How often a mailbox is looked at, at most: all of them together cost one file server."""
    return max(0.004, num_workers / _LOOKS_PER_S)


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
