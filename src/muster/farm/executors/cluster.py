"""What is asked of a cluster: how many workers, and what each of them gets. No heavy imports."""

from __future__ import annotations

from dataclasses import dataclass

from muster.base.errors import UsageError


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
    address: str | None = None

    def __post_init__(self) -> None:
        for name, least in (("num_workers", 1), ("gpus_per_worker", 0), ("cpus_per_worker", 1)):
            value = getattr(self, name)
            if value < least:
                flag = "--" + name.removeprefix("num_").replace("_", "-")
                raise UsageError(f"{flag} {value} is too small.", hint=f"write {least} or more.")
