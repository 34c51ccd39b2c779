"""What is sent to SLURM for the workers of a run: an array's script, and its submission."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

from muster.base.errors import MissingPackageError, SetupError, UsageError
from muster.base.settings import kept_environment, read_settings, variable
from muster.farm.executors.cluster import ClusterRequest, with_site
from muster.run.folder import RunFolder
from muster.slurm.commands import submit as send_script
from muster.slurm.sbatch import CORES_PER_GPU, further_options, gpus_among
from muster.slurm.site import read_site

#: Variables that say which cluster is meant.
_CLUSTER = ("SLURM_CONF", "SLURM_CLUSTERS")


def array_name(folder: RunFolder) -> str:
    """Names the array without a coordinator of this folder: no coordinator ends its elements."""
    return f"{job_name(folder)}-array"


def job_name(folder: RunFolder) -> str:
    """Names the pilots' jobs of this run folder and of no other; squeue filters by it."""
    path = str(folder.path.absolute())
    shown = re.sub(r"[^A-Za-z0-9_.-]", "-", folder.path.absolute().name)[:24]
    return f"muster-{shown}-{sha256(path.encode()).hexdigest()[:10]}"


def script(request: ClusterRequest, folder: RunFolder, slots: Sequence[int], line: str = "") -> str:
    """The text that is handed to sbatch for these slots. Nothing is written or sent.

    ``line``: what each element runs, a line of bash; a pilot when there is none.
    """
    folder = RunFolder(folder.path.absolute())
    from_submitit = _submitit().slurm.slurm._make_sbatch_string
    parameters = _parameters(request, folder, slots, is_pilot=not line)
    command = line or pilot_command(folder)
    return str(from_submitit(command=command, folder=folder.job_files, **parameters))


def submit(request: ClusterRequest, folder: RunFolder, slots: Sequence[int], line: str = "") -> int:
    """Submit what ``script`` shows and keep it beside the outputs; the array's id.

    Raises SetupError with what sbatch said.
    """
    submitit = _submitit()
    folder = RunFolder(folder.path.absolute())
    folder.job_files.mkdir(parents=True, exist_ok=True)
    path = folder.job_files / f"submission-{os.getpid()}.sh"
    path.write_text(script(request, folder, slots, line))
    try:
        with _outside_of_jobs(submitit):
            job_id = send_script(path, Path.cwd())
    except SetupError:
        path.unlink()
        raise
    path.rename(folder.job_files / f"{job_id}_submission.sh")
    return int(job_id)


@contextmanager
def _outside_of_jobs(submitit: Any) -> Iterator[None]:
    """This may itself be a job, whose limits sbatch would take over; the cluster stays the same."""
    found = {name: value for name in _CLUSTER if (value := variable(name)) is not None}
    with submitit.helpers.clean_env(), kept_environment(found):
        yield


def pilot_command(folder: RunFolder) -> str:
    words = [sys.executable, "-m", "muster.farm.pilot", str(folder.path.absolute())]
    return shlex.join(words)


def _parameters(
    request: ClusterRequest, folder: RunFolder, slots: Sequence[int], *, is_pilot: bool
) -> dict[str, Any]:
    """As submitit names them, with what the site file adds."""
    request = with_site(request, read_site(read_settings()))
    output = f"{path_for_output(folder)}/%A_%a.out"
    further = further_options(request.slurm_args)
    more: dict[str, Any] = {"array": _ranges(slots), "output": output, "requeue": True}
    if not is_pilot:  # a program that knows TERM: it finishes what it is at
        more["signal"] = f"TERM@{request.warn_before_s}"
    gpus: int | None = request.whole_gpus or None
    if num_further := gpus_among(further):  # GPUs of a kind, such as gres=gpu:a100:1
        gpus = None
    num_cores: int | None = request.cores_per_job
    if request.cpus_per_worker is None and num_further:
        num_cores = CORES_PER_GPU * num_further
    if request.cpus_per_worker is None and "cpus-per-gpu" in further:
        num_cores = None
    cores = [] if num_cores is None else [f"--cpus-per-task={num_cores}"]
    return {
        "job_name": job_name(folder) if is_pilot else array_name(folder),
        "partition": request.partition,
        "account": request.account,
        "time": request.time_limit,
        "cpus_per_task": num_cores,
        "gpus_per_node": gpus,
        "mem": request.memory,
        "ntasks_per_node": 1,
        "setup": list(request.setup_lines) or None,
        "signal_delay_s": request.warn_before_s,
        "stderr_to_stdout": True,
        "wckey": None,
        "srun_args": ["--output", output, *cores],
        "additional_parameters": {
            **more,
            **{name: value or True for name, value in further.items()},
        },
    }


def path_for_output(folder: RunFolder) -> str:
    """The folder of the jobs' outputs as sbatch and srun read it, where % begins a field.

    Raises UsageError for a backslash, which tells them to replace no fields at all.
    """
    path = str(folder.job_files)
    if "\\" in path:
        raise UsageError(
            f"--run-dir {folder.path}: SLURM cannot write below a backslash.",
            hint="name another run folder.",
        )
    return path.replace("%", "%%")


def _ranges(slots: Sequence[int]) -> str:
    """Numbers as sbatch writes them.

    >>> _ranges([0, 1, 2, 5, 7, 8])
    '0-2,5,7-8'
    """
    parts: list[list[int]] = []
    for number in sorted(slots):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)


def _submitit() -> Any:
    try:
        import submitit
        import submitit.helpers
        import submitit.slurm.slurm
    except ImportError as error:
        raise MissingPackageError("--on slurm", "submitit", "slurm") from error
    return submitit
