"""The flags that ask a cluster for workers, and the request they mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from muster.api.options import parse_duration
from muster.base.errors import UsageError
from muster.farm.executors.cluster import ClusterRequest
from muster.farm.executors.table import CLUSTERS

_NOT_OF = {
    "slurm": ("address", "resource", "placement_strategy"),
    "ray": ("mem", "time", "partition", "account", "slurm_arg", "warn_before"),
}


@dataclass(frozen=True, kw_only=True)
class ClusterFlags:
    """With --on slurm or --on ray: how many workers, and what each gets."""

    workers: int | None = None
    """How many workers."""
    gpus_per_worker: float | None = None
    """GPUs of each; on Ray also a part of one, such as 0.5."""
    cpus_per_worker: int | None = None
    """CPU cores of each. Default: 1, or on SLURM 4 with each GPU."""
    mem: str | None = None
    """SLURM: memory of each worker, such as 16G."""
    time: str | None = None
    """SLURM: how long a worker may run, such as 4:00:00."""
    partition: str | None = None
    """SLURM: where to run."""
    account: str | None = None
    """SLURM: whom to charge."""
    slurm_arg: tuple[str, ...] = ()
    """SLURM: NAME=VALUE, one more option of sbatch. May be given several times."""
    warn_before: str | None = None
    """SLURM: how long before its time limit a worker is warned, so that ctx.checkpoint saves in
    time. Default: 90 seconds."""
    address: str | None = None
    """Ray: HOST:PORT of a cluster that runs already; one is started here otherwise."""
    resource: tuple[str, ...] = ()
    """Ray: NAME=AMOUNT of a custom resource of each worker. May be given several times."""
    placement_strategy: Literal["DEFAULT", "SPREAD"] | None = None
    """Ray: DEFAULT fills nodes one after another, SPREAD spreads the workers over all nodes."""


def cluster_request_from(flags: ClusterFlags, executor: str) -> ClusterRequest:
    """What the flags ask for; UsageError for one that has no effect with ``--on executor``."""
    values = vars(flags)  # a recipe with a setting of the same name takes it from here
    for name in (name for name, value in values.items() if value not in (None, ())):
        engines = [engine for engine in CLUSTERS if name not in _NOT_OF[engine]]
        if executor not in engines:
            raise UsageError(
                f"--{name.replace('_', '-')} has no effect with --on {executor}.",
                hint=f"add --on {' or '.join(engines)}, or drop it.",
            )
    if flags.warn_before is not None:
        values = {
            **values,
            "warn_before": round(parse_duration(flags.warn_before, "--warn-before")),
        }
    names = {
        "warn_before": "warn_before_s",
        "workers": "num_workers",
        "mem": "memory",
        "time": "time_limit",
        "slurm_arg": "slurm_args",
        "resource": "resources",
    }
    given = {names.get(n, n): value for n, value in values.items() if value is not None}
    request = ClusterRequest(**given)
    if executor == "slurm":
        _ = request.whole_gpus  # refuses a part of one
    return request
