"""SLURM's commands: submit a script, ask how a job is. The reading of their output is pure."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
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
        raise SetupError(f"SLURM does not answer: {_plain(done.stderr, 'scontrol')}")
    words = ("-X", "-n", "-P", "-j", job_id, "-o", "State,ExitCode")
    kept = _run("sacct", *words) if shutil.which("sacct") else None
    if kept is None or kept.returncode or not kept.stdout.strip():
        return JobStatus(state="UNKNOWN")
    return parse_account(kept.stdout)


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


def advice(words: str) -> str:
    """What to do about a refusal that says ``words``."""
    if "partition" in words:
        known = _run("sinfo", "-h", "-o", "%R").stdout.split()
        return f"--partition NAME; the partitions here are {', '.join(sorted(set(known)))}."
    if "account" in words.lower():
        return "--account NAME; `sacctmgr show associations user=$USER` lists yours."
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
        raise SetupError(f"{words[0]} has not answered for {_PATIENCE_S:.0f} s.") from None


def _plain(text: str, command: str) -> str:
    """``sbatch: error: no. sbatch: error: never`` as ``no. never``."""
    lines: Sequence[str] = [
        line.removeprefix(f"{command}: ").removeprefix("error: ").strip()
        for line in text.splitlines()
    ]
    return "; ".join(line for line in lines if line) or "it gave no reason"
