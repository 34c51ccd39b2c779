"""A gang as one SLURM job: one launcher per node, meeting at the first node of the allocation.

The script is written by us and sent with sbatch, not through submitit. submitit sends a pickled
function, which nobody can read, edit or send by hand, and its own signal handler decides about the
requeue. Here the launcher already passes signals on, saves and says so with exit code 75; the
script has only to act on that, in a dozen lines that ``--dry-run`` shows as they are.

What happens to the job:

* preemption: SLURM sends TERM to the launchers, the ranks save, and the script puts the job back
  into the queue, where it starts again with the same command and goes on from the checkpoint;
* time limit: SLURM warns the script, which sends the launchers TERM; as above, if they have saved.
  A program that does not save is not started again: it would never end;
* scancel: the launchers end their ranks; the job is not put back.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from muster.base.errors import EXIT_INTERRUPTED, EXIT_REQUEUE, UsageError
from muster.run.folder import RunFolder
from muster.slurm.sbatch import (
    CORES_PER_GPU,
    BatchScript,
    check_memory,
    check_time,
    command_line,
    further_options,
    gpus_among,
    time_limit_s,
)
from muster.slurm.site import SlurmSite

#: Between SLURM's warning and the time limit, when nothing asks for more.
_WARNING_S = 60
#: Beyond the grace of the ranks, what launchers need to end.
_LAUNCHER_S = 30
#: SLURM looks at time limits twice a minute, so a warning may come that much early.
_EARLY_S = 35
#: Exit code of a launcher that TERM has met before it listened, while it started.
_KILLED = 128 + 15


@dataclass(frozen=True, kw_only=True)
class GangRequest:
    """What a gang asks of SLURM; None leaves it to the site file, then to SLURM.

    Attributes
        num_nodes: how many nodes; each runs one launcher.
        gpus_per_node: 0 for ranks on the CPU.
        memory: of each node, as SLURM writes it (``64G``).
        slurm_args: further options of sbatch, each as ``name=value`` or ``name``.
        grace_s: how long ranks may take to save.
    """

    num_nodes: int = 1
    gpus_per_node: int = 0
    cpus_per_node: int | None = None
    memory: str | None = None
    time_limit: str | None = None
    partition: str | None = None
    account: str | None = None
    slurm_args: tuple[str, ...] = ()
    grace_s: float = 15.0

    def __post_init__(self) -> None:
        if self.num_nodes < 1:
            raise UsageError(f"--nodes {self.num_nodes} is too small.", hint="write 1 or more.")
        if self.cpus_per_node is not None and self.cpus_per_node < 1:
            raise UsageError(f"--cpus-per-node {self.cpus_per_node} is too small.")
        if self.time_limit is not None:
            check_time(self.time_limit)
        if self.memory is not None:
            check_memory(self.memory)
        further_options(self.slurm_args)


@dataclass(frozen=True, kw_only=True)
class NodeCommand:
    """What runs on each node: ``muster HEAD… <its place among the nodes> REST…`` in ``cwd``."""

    head: Sequence[str]
    rest: Sequence[str]
    cwd: Path


def gang_script(
    request: GangRequest, site: SlurmSite, command: NodeCommand, folder: RunFolder
) -> BatchScript:
    """The batch script of this gang."""
    return BatchScript(
        options=tuple(_options(request, site, folder).items()),
        lines=(
            command_line(["cd", "--", str(command.cwd)]) + " || exit",
            *site.setup_lines,
            *(_meeting_place() if request.num_nodes > 1 else ()),
            *_watch(_warning_s(request, request.time_limit or site.time_limit)),
            _srun(request, site, command),
            *_END,
        ),
    )


def _options(request: GangRequest, site: SlurmSite, folder: RunFolder) -> dict[str, str]:
    limit, memory = request.time_limit or site.time_limit, request.memory or site.memory
    logs = _pattern(folder.slurm.absolute())
    options = {
        "job-name": folder.name,
        "output": f"{logs}/job-%j.log",
        "open-mode": "append",
        "nodes": str(request.num_nodes),
        "ntasks-per-node": "1",
        "requeue": "",
        "signal": f"B:USR1@{_warning_s(request, limit)}",
    }
    if request.gpus_per_node:
        options["gpus-per-node"] = str(request.gpus_per_node)
    wanted = {
        "cpus-per-task": None if (cores := _cores(request, site)) is None else str(cores),
        "mem": None if memory is None else check_memory(memory),
        "time": limit,
        "partition": request.partition or site.partition,
        "account": request.account or site.account,
    }
    options |= {name: value for name, value in wanted.items() if value is not None}
    further = {**dict(site.options), **further_options(request.slurm_args)}
    if gpus_among(further):  # GPUs of a kind, such as gres=gpu:a100:4
        options.pop("gpus-per-node", None)
    return options | further


def _cores(request: GangRequest, site: SlurmSite) -> int | None:
    """Of a node: as said, else some for each GPU, where ranks would share a single one."""
    further = {**dict(site.options), **further_options(request.slurm_args)}
    if request.cpus_per_node is not None or "cpus-per-gpu" in further:
        return request.cpus_per_node
    return CORES_PER_GPU * (gpus_among(further) or request.gpus_per_node or 0) or None


def _pattern(path: Path) -> str:
    """A path as ``--output`` understands it; UsageError for one that it cannot mean."""
    if "\\" in str(path):
        raise UsageError(
            f"{path} has a backslash in it, which SLURM leaves out of the names of its logs.",
            hint="choose another --run-dir.",
        )
    return str(path).replace("%", "%%")


def _warning_s(request: GangRequest, limit: str | None) -> int:
    wanted = max(_WARNING_S, round(request.grace_s) + _LAUNCHER_S)
    return wanted if limit is None else max(1, min(wanted, time_limit_s(limit) // 2))


_FREE_PORT = "import socket; s = socket.socket(); s.bind((str(), 0)); print(s.getsockname()[1])"


def _meeting_place() -> tuple[str, ...]:
    return (
        "# Where the nodes meet: the first one, which also runs this script, at a free port.",
        'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        'address=$(scontrol -o show node "$first" | sed -n "s/.* NodeAddr=\\([^ ]*\\) .*/\\1/p")',
        f"port=$({command_line([sys.executable, '-c', _FREE_PORT])})",
    )


def _watch(warning_s: int) -> tuple[str, ...]:
    near = f"$((end - $(date +%s))) -le {warning_s + _EARLY_S}"
    return (
        "",
        "# Shortly before the time limit SLURM sends USR1 to this script, at a preemption maybe.",
        'end=$(SLURM_TIME_FORMAT=standard squeue -h -j "$SLURM_JOB_ID" -o %e)',
        'end=$(date -d "$end" +%s 2>/dev/null)',
        "at_limit=0",
        "warned() {",
        f'    if [ -n "$end" ] && [ {near} ]; then at_limit=1; fi',
        '    scancel --signal=TERM "$SLURM_JOB_ID"  # to the launchers, not to this script',
        "}",
        "trap warned USR1",
        "trap : TERM  # the launchers hear it as well, and may take their time",
        "",
        "# A launcher per node. Without SLURM_PROCID, which would make it one of the ranks.",
    )


_END = (
    "step=$!",
    "while :; do",
    '    wait "$step"  # a signal interrupts it',
    "    code=$?",
    '    kill -0 "$step" 2>/dev/null || break',
    "done",
    "",
    f"# {EXIT_REQUEUE}: the ranks have saved. {EXIT_INTERRUPTED}, {_KILLED}: a signal ended them; "
    "preempted, if not at the limit.",
    'case "$code" in',
    f"{EXIT_REQUEUE}) again=1 ;;",
    f"{EXIT_INTERRUPTED} | {_KILLED}) again=$((1 - at_limit)) ;;",
    "*) again=0 ;;",
    "esac",
    'state=$(squeue -h -j "$SLURM_JOB_ID" -o %T)  # no longer RUNNING after scancel',
    'if [ "$again" -eq 1 ] && [ "$state" = RUNNING ]; then',
    '    scontrol requeue "$SLURM_JOB_ID" && sleep 300  # SLURM ends this script',
    "fi",
    'exit "$code"',
)


def _srun(request: GangRequest, site: SlurmSite, command: NodeCommand) -> str:
    words = command_line(["exec", sys.executable, "-m", "muster", *command.head])
    first, given = ["muster"], '"$@"'
    if request.num_nodes > 1:
        words += (
            f' --nodes {request.num_nodes} --node-rank "$SLURM_NODEID"'
            ' --master-addr "$0" --master-port "$1"'
        )
        first, given = ['"$address"', '"$port"'], '"${@:2}"'
    cores = _cores(request, site)  # which srun does not take over from sbatch
    srun = ["srun", *([] if cores is None else [f"--cpus-per-task={cores}"])]
    launcher = command_line([*srun, "bash", "-c", f"unset SLURM_PROCID; {words} {given}"])
    return " ".join([launcher, *first, command_line(command.rest), "&"])
