"""The text of every batch script that is sent to SLURM: of a gang's job, and of an array.

``#SBATCH`` lines are not read by a shell: nothing in them is expanded, and words are split at
blanks unless quoted. The lines below them are bash.

An array's script is submitit's. A gang's is our own: submitit sends a pickled function, which
nobody can read, edit or send by hand, and its signal handler decides about the requeue. Here the
launcher already passes signals on, saves and says so with exit code 75; the script has only to act
on that, in a dozen lines that ``--dry-run`` shows as they are. What happens to a gang's job:

* preemption: SLURM sends TERM to the launchers, the ranks save, and the script puts the job back
  into the queue, where it starts again with the same command and goes on from the checkpoint;
* time limit: SLURM warns the script, which sends the launchers TERM; as above, if they have saved.
  A program that does not save is not started again: it would never end;
* scancel: the launchers end their ranks; the job is not put back;
* `muster cancel`: the launchers are asked to end, and the ranks save in their own time; the first
  launcher leaves a file that says so, and the script cancels its job.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from muster.base.errors import EXIT_INTERRUPTED, EXIT_REQUEUE, MissingPackageError, UsageError
from muster.base.shown_text import number_ranges
from muster.run.folder import RunFolder
from muster.slurm.request import JobRequest, check_one_line, time_limit_s

#: The time between SLURM's warning and the time limit of a gang, where nothing asks for more.
_WARNING_S = 60
#: The time that launchers need to end, beyond the grace of the ranks.
_LAUNCHER_S = 30
#: SLURM looks at time limits twice a minute, so a warning may come this much too early.
_EARLY_S = 35
#: The exit code of a launcher that got TERM while it started, before it listened to signals.
_KILLED = 128 + 15


# ---------------------------------------------------------------- lines


def directive(name: str, value: str = "") -> str:
    """One ``#SBATCH`` line.

    >>> directive("comment", "two words")
    '#SBATCH --comment="two words"'
    """
    check_one_line(f"--{name}", value)
    if not value:
        return f"#SBATCH --{name}"
    is_plain = re.fullmatch(r"[^\s'\"\\#]+", value)
    quoted = value.replace("\\", "\\\\").replace('"', '\\"')
    return f"#SBATCH --{name}={value}" if is_plain else f'#SBATCH --{name}="{quoted}"'


def batch_script(options: Mapping[str, str], lines: Sequence[str]) -> str:
    """What is asked of SLURM, by sbatch's long options, then bash that does the work."""
    directives = [directive(name, value) for name, value in options.items()]
    return "\n".join(["#!/bin/bash", *directives, "", *lines, ""])


def path_pattern(folder: RunFolder, path: Path) -> str:
    """A path in the run folder as sbatch and srun read it, where % begins a field.

    Raises UsageError for a backslash, which tells SLURM to replace no fields, and is dropped.
    """
    if "\\" in str(path):
        raise UsageError(
            f"--run-dir {folder.path}: SLURM cannot write below a backslash.",
            hint="name another run folder.",
        )
    return str(path).replace("%", "%%")


# ---------------------------------------------------------------- a gang's job


def gang_warning_s(grace_s: float) -> int:
    """How many seconds before its limit a gang is warned whose ranks have ``grace_s`` to save."""
    return max(_WARNING_S, round(grace_s) + _LAUNCHER_S)


def gang_script(request: JobRequest, folder: RunFolder, cwd: Path, of: str = "") -> str:
    """One launcher per node; they meet at the first node of the allocation.

    The record of the run says what they start, in the folder ``cwd``. ``of``: a digest by which
    they see that the record is still the one that the script was made for.
    """
    limit, warning_s = request.time_limit, request.warn_before_s
    if limit is not None:
        warning_s = max(1, min(warning_s, time_limit_s(limit) // 2))
    options = {
        "job-name": folder.name,
        "output": f"{path_pattern(folder, folder.slurm.absolute())}/job-%j.log",
        "open-mode": "append",
        "nodes": str(request.num_nodes),
        "ntasks-per-node": "1",
        "requeue": "",
        "signal": f"B:USR1@{warning_s}",
    }
    lines = (
        shlex.join(["cd", "--", str(cwd)]) + " || exit",
        *request.setup_lines,
        *(_MEETING if request.num_nodes > 1 else ()),
        *_on_warning(warning_s),
        _launchers(request, folder, of),
        *_WAIT,
        *_if_cancelled(folder),
        *_REQUEUE,
    )
    return batch_script(options | request.options(), lines)


_MEETING = (
    "# Where the nodes meet: the first one, which also runs this script, at a free port.",
    'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
    'address=$(scontrol -o show node "$first" | sed -n "s/.* NodeAddr=\\([^ ]*\\) .*/\\1/p")',
    "# A process beside it holds the port, for the launchers take seconds until they listen.",
    f"coproc held {{ exec {shlex.join([sys.executable, '-m', 'muster.base.held_port'])}; }}",
    'read -r port <&"${held[0]}"',
)


def _on_warning(warning_s: int) -> tuple[str, ...]:
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


def _launchers(request: JobRequest, folder: RunFolder, of: str) -> str:
    words = shlex.join([sys.executable, "-m", "muster", "resume", str(folder.path.absolute())])
    words = f'unset SLURM_PROCID; exec {words} --node-rank "$SLURM_NODEID"'
    place = ""
    if request.num_nodes > 1:
        words += ' --master-addr "$0" --master-port "$1"'
        place = ' "$address" "$port"'
    words += f" --of-script {of}" if of else ""
    cores = request.num_cores  # which srun does not take over from sbatch
    srun = ["srun", *([] if cores is None else [f"--cpus-per-task={cores}"])]
    return f"{shlex.join([*srun, 'bash', '-c', words])}{place} &"


_WAIT = (
    "step=$!",
    "while :; do",
    '    wait "$step"  # a signal interrupts it',
    "    code=$?",
    '    kill -0 "$step" 2>/dev/null || break',
    "done",
)


def _if_cancelled(folder: RunFolder) -> tuple[str, ...]:
    words = shlex.quote(f"{folder.slurm.absolute()}/job-") + '"$SLURM_JOB_ID".cancelled'
    return (
        "",
        "# After `muster cancel` the ranks have ended in their own time, and for good.",
        f'if [ "$code" -ne 0 ] && [ -e {words} ]; then',
        '    scancel "$SLURM_JOB_ID"',
        '    exit "$code"',
        "fi",
        "",
    )


_REQUEUE = (
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


# ---------------------------------------------------------------- an array of a sweep or map


def array_script(
    request: JobRequest, folder: RunFolder, slots: Sequence[int], line: str = ""
) -> str:
    """The script of an array with an element for each of these slots.

    ``line``: what each element runs, a line of bash; a pilot when there is none. Raises
    MissingPackageError without submitit.
    """
    folder = RunFolder(folder.path.absolute())
    output = f"{path_pattern(folder, folder.job_files)}/%A_%a.out"
    options = request.options()
    if "cpus-per-gpu" not in options:
        options.setdefault("cpus-per-task", "1")
    cores = options.get("cpus-per-task")  # which srun does not take over from sbatch
    more = {
        "array": ",".join(number_ranges(slots)),
        "output": output,
        "ntasks-per-node": "1",
        "requeue": "",
    }
    if line:  # a program that knows TERM: it finishes what it is at
        more["signal"] = f"TERM@{request.warn_before_s}"
    options = options | more
    text = _submitit().slurm.slurm._make_sbatch_string(
        command=line or shlex.join([sys.executable, "-m", "muster.farm.pilot", str(folder.path)]),
        folder=folder.job_files,
        job_name=folder.array_name if line else folder.job_name,
        time=None,
        wckey=None,
        setup=list(request.setup_lines) or None,
        signal_delay_s=request.warn_before_s,
        stderr_to_stdout=True,
        srun_args=["--output", output, *([] if cores is None else [f"--cpus-per-task={cores}"])],
        additional_parameters={name: value or True for name, value in options.items()},
    )
    return str(text)


def outside_of_jobs() -> AbstractContextManager[None]:
    """A context without SLURM's variables: sbatch would take over the limits of a job we are in."""
    context: AbstractContextManager[None] = _submitit().helpers.clean_env()
    return context


def _submitit() -> Any:
    try:
        import submitit
        import submitit.helpers
        import submitit.slurm.slurm
    except ImportError as error:
        raise MissingPackageError("--on slurm", "submitit", "slurm") from error
    return submitit
