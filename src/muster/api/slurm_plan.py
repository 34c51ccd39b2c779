"""What a sweep would send to SLURM: for ``--dry-run`` and ``muster slurm-script``."""

from __future__ import annotations

from muster.api.launch import Prepared
from muster.farm.executors.slurm_script import script


def sweep_script(prepared: Prepared) -> str:
    """The script of a sweep's workers, exactly as sbatch would get it when the run begins.

    Raises SetupError without submitit, or with a site file that cannot be read.
    """
    request = prepared.options.cluster
    slots = range(max(1, min(request.num_workers, prepared.workload.total)))
    return script(request, prepared.folder, slots)
