"""The environment, read once into a value. No other module here reads ``os.environ``."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

#: How many workers share the GPU of the one that reads it.
WORKERS_PER_GPU = "MUSTER_WORKERS_PER_GPU"
#: Of a command that is a task: the folder of its attempt, and one that all attempts find.
TASK_DIR, CHECKPOINT_DIR = "MUSTER_TASK_DIR", "MUSTER_CHECKPOINT_DIR"
#: Set by a user whose tasks import a torch that cannot use the GPU, and use the GPU without it.
ALLOW_CPU_TORCH = "MUSTER_ALLOW_CPU_TORCH"
if sys.platform == "win32":
    import tempfile

    _TEMPORARY = tempfile.gettempdir()
else:
    _TEMPORARY = "/tmp"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the environment says, and nothing else.

    ``cuda_visible_devices``: ``None`` when unset (all devices), ``""`` when set to nothing.
    ``device_facts``: a JSON file with a recorded inventory, used instead of the driver.
    ``ledger_folder``: a local disk for ledgers, for run folders on a network file system.
    ``state_folder``: where they go when the run folder is recognised as being on one.
    ``slurm_site``: defaults of this user for jobs on SLURM.
    ``slurm_job_id``: the job of SLURM that this process runs in.
    ``omp_num_threads``: the user's own choice, which the ranks of a gang keep.
    ``mps_folder``: where NVIDIA's MPS server, if it runs, listens to its clients.
    ``allows_cpu_torch``: a torch that cannot use the GPU of its worker is no reason to refuse.
    ``is_task``: this is a command of a sweep, which has leased the devices that it sees.
    ``lease_folder``: where the per-GPU lock files of this host live (shared by all users).
    ``queue_rules``: the administrator's rules for its GPUs; another file counts only in another
    lease folder, so that nobody in the shared one leaves the rules.
    """

    cuda_visible_devices: str | None = None
    device_facts: Path | None = None
    ledger_folder: Path | None = None
    state_folder: Path = Path("~/.local/state")
    mps_folder: Path = Path("/tmp/nvidia-mps")
    # Not where TMPDIR says, which each user may have set to a place of his own.
    lease_folder: Path = Path(_TEMPORARY) / "muster-leases"
    queue_rules: Path = Path("/etc/muster/queue.toml")
    slurm_site: Path = Path("~/.config/muster/slurm.toml")
    slurm_job_id: str | None = None
    cpu_count: int = 1
    omp_num_threads: int | None = None
    allows_cpu_torch: bool = False
    is_task: bool = False
    user: str = "unknown"


def read_settings(environment: Mapping[str, str] | None = None) -> Settings:
    """The settings in ``environment`` (the process's own by default)."""
    env = os.environ if environment is None else environment
    facts = env.get("MUSTER_DEVICE_FACTS")
    leases = env.get("MUSTER_LEASE_DIR")
    is_elsewhere = bool(leases) and Path(leases or "").resolve() != Settings.lease_folder.resolve()
    rules = env.get("MUSTER_QUEUE_RULES") if is_elsewhere else None
    ledgers = env.get("MUSTER_LEDGER_DIR")
    state = env.get("XDG_STATE_HOME") or "~/.local/state"
    site = env.get("MUSTER_SLURM_SITE")
    threads = env.get("OMP_NUM_THREADS", "")
    return Settings(
        cuda_visible_devices=env.get("CUDA_VISIBLE_DEVICES"),
        device_facts=Path(facts) if facts else None,
        ledger_folder=Path(ledgers) if ledgers else None,
        state_folder=Path(state).expanduser(),
        mps_folder=Path(env.get("CUDA_MPS_PIPE_DIRECTORY") or Settings.mps_folder),
        lease_folder=Path(leases) if leases else Settings.lease_folder,
        queue_rules=Path(rules) if rules else Settings.queue_rules,
        slurm_site=Path(site or Settings.slurm_site).expanduser(),
        slurm_job_id=env.get("SLURM_JOB_ID") or None,
        cpu_count=usable_cpu_count(),
        omp_num_threads=int(threads) if threads.isdigit() and int(threads) else None,
        allows_cpu_torch=env.get(ALLOW_CPU_TORCH, "0") not in ("", "0"),
        is_task=bool(env.get(CHECKPOINT_DIR)),
        user=env.get("USER") or env.get("LOGNAME") or env.get("USERNAME") or "unknown",
    )


class JobPlace(NamedTuple):
    """Where in SLURM this process runs. ``restart``: how often its job was requeued."""

    job_id: str  # of this element alone
    array_id: int
    element: int
    restart: int


def job_place() -> JobPlace | None:
    """The element of an array job that this process belongs to; None outside of one."""
    env = os.environ
    array, element = env.get("SLURM_ARRAY_JOB_ID", ""), env.get("SLURM_ARRAY_TASK_ID", "")
    if not (array.isdigit() and element.isdigit()):
        return None
    restart = env.get("SLURM_RESTART_COUNT", "0")
    job_id = env.get("SLURM_JOB_ID", array)
    return JobPlace(job_id, int(array), int(element), int(restart) if restart.isdigit() else 0)


def usable_cpu_count() -> int:
    """Cores this process may use, which in a container or a job is fewer than the host has."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def waiting_threads(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """How OpenMP's threads wait for each other in what is started: they look for some microseconds,
    and then sleep. Nothing where the user has said how.

    GNU's own default is to spin for many milliseconds, which on a core that others want as well
    makes a step ten times as long (docs/decisions/0024-threads-wait-briefly.md).
    """
    env = os.environ if environment is None else environment
    is_said = "OMP_WAIT_POLICY" in env or "GOMP_SPINCOUNT" in env
    return {} if is_said else {"GOMP_SPINCOUNT": "500"}


def child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """This process's environment with ``extra`` on top, for a process about to be started."""
    return {**os.environ, **extra}


def replace_environment(values: Mapping[str, str]) -> None:
    """Give this very process another environment; for one that was forked for other work."""
    os.environ.clear()
    os.environ.update(values)


@contextmanager
def kept_environment(values: Mapping[str, str] | None = None) -> Iterator[None]:
    """For a library that reads and writes this process's environment: it finds ``values`` there,
    and afterwards all is as before.
    """
    before = dict(os.environ)
    os.environ.update(values or {})
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def secret(name: str) -> str | None:
    """One variable that the user named, such as an API key; None when it is unset or empty."""
    return os.environ.get(name) or None


def secrets() -> list[str]:
    """The values of variables that look like secrets, the longest first: no log may hold them."""
    words = ("KEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL")
    found = {v for k, v in os.environ.items() if any(word in k.upper() for word in words)}
    return sorted((value for value in found if len(value) > 5), key=len, reverse=True)


def variable(name: str) -> str | None:
    """One variable of another program's, such as SLURM's; None when it is unset."""
    return os.environ.get(name)
