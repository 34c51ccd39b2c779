"""SLURM's commands: submit a script, ask how a job is. The reading of their output is pure."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from muster.base.errors import SetupError
from muster.base.settings import child_environment

_PATIENCE_S = 60.0
#: States in which a job may still run, now or again.
_ALIVE = frozenset({
    "PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "STAGE_OUT", "SUSPENDED", "STOPPED",
    "SIGNALING", "RESIZING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT",
    "RESV_DEL_HOLD",
})  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class JobStatus:
    """How a job is. ``state`` as SLURM writes it; UNKNOWN when SLURM has forgotten the job.

    Attributes
        reason: why it waits, or why it ended; "" for none.
        exit_code, signal: of the batch script, once it has ended.
        restarts: how often it was sent back to the queue.
        nodes: where it runs, in SLURM's short form.
    """

    state: str
    reason: str = ""
    exit_code: int = 0
    signal: int = 0
    restarts: int = 0
    nodes: str = ""

    @property
    def is_alive(self) -> bool:
        return self.state in _ALIVE


def submit(script: Path, cwd: Path) -> str:
    """Send a batch script from the folder ``cwd``; returns the job's id.

    Raises SetupError with sbatch's own words when it is refused.
    """
    done = _run("sbatch", "--parsable", str(script), cwd=cwd)
    if done.returncode:
        if has_no_controller(done.stderr):
            raise no_answer(done.stderr, "sbatch")
        words = _plain(done.stderr, "sbatch")
        raise SetupError(f"SLURM has refused the job: {words}", hint=advice(words))
    return done.stdout.strip().partition(";")[0]


def job_status(job_id: str) -> JobStatus:
    """How the job is now: by its controller, else by its accounting, else UNKNOWN.

    Raises SetupError when the controller does not answer.
    """
    done = _run("scontrol", "-o", "show", "job", job_id)
    if done.returncode == 0:
        return parse_job(done.stdout)
    if "Invalid job id" not in done.stderr:
        raise no_answer(done.stderr, "scontrol")
    words = ("-X", "-n", "-P", "-j", job_id, "-o", "State,ExitCode")
    kept = _run("sacct", *words) if shutil.which("sacct") else None
    if kept is None or kept.returncode or not kept.stdout.strip():
        return JobStatus(state="UNKNOWN")
    return parse_account(kept.stdout)


def cancel_job(job_id: str) -> None:
    """End the job; one that has ended is no error."""
    _run("scancel", "--quiet", job_id)


def parse_job(text: str) -> JobStatus:
    """A line of ``scontrol -o show job``.

    >>> status = parse_job("JobId=7 JobState=FAILED Reason=None Restarts=1 ExitCode=75:0")
    >>> status.state, status.reason, status.exit_code, status.restarts
    ('FAILED', '', 75, 1)
    """
    fields = dict(re.findall(r"(?:^|\s)(\w+)=(\S*)", text.strip().partition("\n")[0]))
    code, _, number = fields.get("ExitCode", "0:0").partition(":")
    return JobStatus(
        state=fields.get("JobState", "UNKNOWN"),
        reason=_said(fields.get("Reason", "")),
        exit_code=int(code or 0),
        signal=int(number or 0),
        restarts=int(fields.get("Restarts", "0") or 0),
        nodes=_said(fields.get("NodeList", "")),
    )


def parse_account(text: str) -> JobStatus:
    """The last line of ``sacct -P -o State,ExitCode``, which a requeued job has several of.

    >>> parse_account("PREEMPTED|0:0\\nCANCELLED by 1000|0:15\\n").state
    'CANCELLED'
    """
    state, _, codes = text.strip().splitlines()[-1].partition("|")
    code, _, number = codes.partition(":")
    return JobStatus(
        state=state.partition(" ")[0], exit_code=int(code or 0), signal=int(number or 0)
    )


def _said(value: str) -> str:
    return "" if value in ("None", "(null)", "N/A", "Unknown") else value


#: What a command prints when slurmctld cannot be reached.
_NO_CONTROLLER = (
    "unable to contact slurm controller", "connection refused", "connection failure",
    "socket timed out", "unable to establish configuration source", "communication connection",
    "zero bytes were transmitted", "no route to host",
)  # fmt: skip


def has_no_controller(stderr: str) -> bool:
    """Whether a command of SLURM has failed because its controller does not answer."""
    return any(words in stderr.lower() for words in _NO_CONTROLLER)


def no_answer(stderr: str, command: str) -> SetupError:
    """The one error for a cluster that cannot be asked, whichever command noticed it."""
    return SetupError(
        f"SLURM does not answer: {_plain(stderr, command)}",
        hint="`scontrol ping` says whether its controller is up; when it is, run the same command "
        "again: it goes on where it was.",
    )


#: Reasons of a waiting job that time alone does not mend: what is wrong, and what to do.
_NEVER: Mapping[str, tuple[str, str]] = {
    "PartitionConfig": (
        "its partition has no nodes such as it asks for",
        "ask for less (--mem, cores, GPUs, --nodes) or another --partition; `sinfo -o '%P %D %c %m "
        "%G'` shows what partitions have.",
    ),
    "PartitionNodeLimit": (
        "it asks for more nodes than its partition gives to one job, or they are all down",
        "lower --nodes or name another --partition; `sinfo` shows which nodes are up.",
    ),
    "PartitionTimeLimit": (
        "it asks for more time than its partition allows",
        "lower --time or name another --partition; `sinfo -o '%P %l'` shows the limits.",
    ),
    "PartitionDown": (
        "its partition is down",
        "name another --partition (`sinfo -o '%P %a'` shows which are up), or run the same command "
        "when it is up again.",
    ),
    "PartitionInactive": (
        "its partition starts no jobs",
        "name another --partition; `sinfo -o '%P %a'` shows which are up.",
    ),
    "BadConstraints": (
        "no node has what it asks for",
        "look at the constraints in --slurm-arg; `sinfo -o '%N %f'` shows the nodes' features.",
    ),
    "InvalidAccount": ("its account is not valid", "name another --account."),
    "AccountNotAllowed": (
        "its partition does not admit its account",
        "name another --account or --partition.",
    ),
    "InvalidQOS": ("its QOS is not valid", "name another with --slurm-arg qos=NAME."),
    "QOSNotAllowed": (
        "its partition does not admit its QOS",
        "name another with --slurm-arg qos=NAME, or another --partition.",
    ),
    "DependencyNeverSatisfied": (
        "it waits for a job that can no longer end as it must",
        "run the same command again without that dependency.",
    ),
    "ReservationDeleted": (
        "its reservation is gone",
        "leave --slurm-arg reservation=… out, or name another one.",
    ),
    "JobHoldMaxRequeue": (
        "it failed to start again and again, and SLURM holds it",
        "see its output and `scontrol show job`; then run the same command again.",
    ),
}
#: Limits of an account, a QOS or a partition that a single job exceeds by itself.
_TOO_MUCH = re.compile(
    r"(?:QOS|Assoc|Association)\w*(?:Max\w*PerJob\w*|MaxWallDuration\w*|TimeLimit|JobLimit)$"
)


def why_never(reason: str) -> tuple[str, str] | None:
    """Why a job that waits for this reason will never start, and what to do; None: it may.

    >>> why_never("Priority") is None, why_never("PartitionTimeLimit")[0]
    (True, 'it asks for more time than its partition allows')
    """
    if (known := _NEVER.get(reason)) is not None:
        return known
    if _TOO_MUCH.match(reason) and "MaxJobs" not in reason:
        return (
            "it asks for more than its account or QOS allows one job",
            "ask for less; `sacctmgr show qos` and `sacctmgr show associations user=$USER` show "
            "the limits.",
        )
    return None


def never_starts(job: str, reason: str) -> SetupError | None:
    """The error for a job that waits for this reason; None where waiting may help."""
    found = why_never(reason)
    if found is None:
        return None
    return SetupError(f"SLURM will never start job {job}: {found[0]} ({reason}).", hint=found[1])


def advice(words: str) -> str:
    """What to do about a refusal that says ``words``."""
    small = words.lower()
    if "array" in small:
        most = re.search(r"MaxArraySize\s*=\s*(\d+)", _run("scontrol", "show", "config").stdout)
        limit = f"at most {most[1]} elements" if most else "a limit (scontrol show config)"
        return (
            f"an array has {limit} here (MaxArraySize): lower --workers or --array, as each takes "
            "many tasks; or split the run."
        )
    if "partition" in small:
        known = _run("sinfo", "-h", "-o", "%R").stdout.split()
        return f"--partition NAME; the partitions here are {', '.join(sorted(set(known)))}."
    if "account" in small:
        return "--account NAME; `sacctmgr show associations user=$USER` lists yours."
    if "node configuration" in small or "cpu count" in small:
        return (
            "no node has that much. 4 cores are asked for with each GPU where nothing is said: "
            "--cpus-per-worker or --cpus-per-node N; `sinfo -o '%P %c %m %G'` shows the nodes."
        )
    return "--dry-run shows the script that is sent; `sinfo` shows what there is."


def _run(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            words,
            cwd=cwd,
            env=child_environment({"SLURM_TIME_FORMAT": "standard"}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PATIENCE_S,
        )
    except FileNotFoundError:
        raise SetupError(
            f"There is no {words[0]} on this machine.",
            hint="--on slurm is for a machine with SLURM's commands: a cluster's login node.",
        ) from None
    except subprocess.TimeoutExpired:
        waited = f"{words[0]} has waited for {_PATIENCE_S:.0f} s"
        raise no_answer(waited, words[0]) from None


def _plain(text: str, command: str) -> str:
    """``sbatch: error: no. sbatch: error: never`` as ``no. never``."""
    lines: Sequence[str] = [
        line.removeprefix(f"{command}: ").removeprefix("error: ").strip()
        for line in text.splitlines()
    ]
    return "; ".join(line for line in lines if line) or "it gave no reason"
