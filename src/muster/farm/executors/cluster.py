"""What is asked of a cluster: how many workers, and what each of them gets. No heavy imports."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from muster.base.errors import UsageError
from muster.base.sbatch import check_memory, check_time, further_options
from muster.base.slurm_site import SlurmSite
from muster.farm.model import TargetSpec

#: Of all mailboxes of a run together, by its coordinator; and as many by its pilots.
_LOOKS_PER_S = 2000


@dataclass(frozen=True, kw_only=True)
class ClusterRequest:
    """Workers on machines that an engine (SLURM, Ray) hands out.

    Attributes
        num_workers: how many pilots: array elements on SLURM, actors on Ray.
        gpus_per_worker, cpus_per_worker: devices and cores of each.
        memory: memory of each as the engine writes it (``16G``); None: the engine's default.
        time_limit: as SLURM writes it (``4:00:00``); None: the partition's.
        partition, account: as SLURM knows them.
        slurm_args: further options of sbatch, each as ``name=value`` or ``name``.
        setup_lines: shell lines before the worker, such as ``module load cuda``.
        warn_before_s: how long before its time limit SLURM warns a worker, so that the running
            task can save its state.
        address: where the Ray cluster is; None: one is started here.
    """

    num_workers: int = 1
    gpus_per_worker: int = 0
    cpus_per_worker: int = 1
    memory: str | None = None
    time_limit: str | None = None
    partition: str | None = None
    account: str | None = None
    slurm_args: tuple[str, ...] = ()
    setup_lines: tuple[str, ...] = ()
    warn_before_s: int = 90
    address: str | None = None

    def __post_init__(self) -> None:
        limits = {"num_workers": 1, "gpus_per_worker": 0, "cpus_per_worker": 1, "warn_before_s": 1}
        for name, least in limits.items():
            value = getattr(self, name)
            if value < least:
                flag = "--" + name.removeprefix("num_").removesuffix("_s").replace("_", "-")
                raise UsageError(f"{flag} {value} is too small.", hint=f"write {least} or more.")
        if self.time_limit is not None:
            check_time(self.time_limit)
        if self.memory is not None:
            check_memory(self.memory)
        further_options(self.slurm_args)


def with_site(request: ClusterRequest, site: SlurmSite) -> ClusterRequest:
    """The request with what it leaves open from the site file."""
    from_site = tuple(f"{name}={value}" if value else name for name, value in site.options)
    return dataclasses.replace(
        request,
        partition=request.partition or site.partition,
        account=request.account or site.account,
        time_limit=request.time_limit or site.time_limit,
        memory=request.memory or site.memory,
        slurm_args=(*from_site, *request.slurm_args),
        setup_lines=(*site.setup_lines, *request.setup_lines),
    )


def needs_of_pilots(request: ClusterRequest, targets: Mapping[int, TargetSpec]) -> dict[str, Any]:
    """What must be the same for a coordinator to go on with the pilots of an earlier one."""
    resources = dataclasses.asdict(request)
    del resources["num_workers"]
    return {
        "request": resources,
        "targets": {str(n): dataclasses.asdict(spec) for n, spec in targets.items()},
    }


def look_every_s(num_workers: int) -> float:
    """How often a mailbox is looked at, at most: all of them together cost one file server."""
    return max(0.004, num_workers / _LOOKS_PER_S)
