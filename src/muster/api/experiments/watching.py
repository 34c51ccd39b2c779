"""A run as another process sees it: whether somebody works on it, and what came of it."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from muster.api.experiments.experiment import ExperimentFolder, find_experiment, state_of_all
from muster.api.look.listing import (
    array_of,
    find_begun,
    find_first_stage,
    find_run,
    held_up,
    job_of,
    places_of,
    word_of,
)
from muster.api.runs import Run, Status
from muster.api.start.limits import PAUSES
from muster.api.start.queued_starts import waiting_process
from muster.base.errors import (
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_REQUEUE,
    EXIT_SOME_FAILED,
    SetupError,
    UsageError,
)
from muster.base.journal import read_journal
from muster.base.processes import is_alive
from muster.base.shown_text import shell_word
from muster.farm.task import TaskState
from muster.run.folder import RunFolder
from muster.run.session import holder, is_held
from muster.run.state import is_between_starts, last_start
from muster.slurm.commands import RefusedError, elements_of, job_status, read_job

if TYPE_CHECKING:
    from muster.api.slurm.array import ArrayProgress

_LOOK_EVERY_S = 0.2
_ASK_SLURM_EVERY_S = 5.0
#: Of a map that runs stage by stage, until the next stage has the lock of its own folder; and of a
#: run that has waited for GPUs, until it has its own.
_BETWEEN_STAGES_S = 20.0
#: Of runs whose next start has waited for GPUs: its process, and when it last did.
_QUEUED: dict[Path, tuple[int, float]] = {}


class End(NamedTuple):
    """What came of a run: the exit code of its command, and a sentence that names the run."""

    exit_code: int
    sentence: str


class QueuedRun(NamedTuple):
    """A run that has no folder yet: its first start waits for GPUs, in a process of this user."""

    path: Path


Waited = Run | ExperimentFolder | QueuedRun


def open_waited(text: str) -> Waited:
    """A run, or an experiment with phases, by its path or name; raises what ``find_run`` raises."""
    begun = find_experiment(text) or find_first_stage(text) or find_begun(text)
    if begun is not None:
        return begun
    for path in places_of(text):
        if _is_queued(RunFolder(path)):
            return QueuedRun(path)
    return find_run(text)


def as_now(run: Waited) -> Waited:
    """The same, opened again where it has waited to begin and has begun since."""
    if isinstance(run, QueuedRun):
        with suppress(UsageError):  # it has left the queue, and has not begun
            return open_waited(str(run.path))
    return run


def open_watched(text: str) -> Run:
    """A run by its path or name; of a map that runs stage by stage also while it has only stages.

    Raises what ``find_run`` raises.
    """
    return find_first_stage(text) or find_run(text)


def folders_of(run: Run) -> list[RunFolder]:
    """The folder of the run; of a map that runs stage by stage those of its stages as well, in the
    order in which they are done."""
    whole = RunFolder(run.folder.whole)
    stages = sorted(whole.path.glob("stages/[0-9]*"), key=lambda path: (len(path.name), path.name))
    return [*map(RunFolder, stages), whole]


def is_at_work(run: Waited) -> bool:
    """Whether a process or a job of SLURM works on the run, waits in the queue, or is about to go
    on with it."""
    if isinstance(run, QueuedRun):
        return _is_queued(RunFolder(run.path)) or not isinstance(as_now(run), QueuedRun)
    if isinstance(run, ExperimentFolder):
        return run.is_held()
    folders = folders_of(run)
    # The lock is asked about twice: it may be taken while the journals are read.
    if any(any(map(ask, folders)) for ask in (is_held, is_between_starts, is_held)):
        for folder in folders:
            _QUEUED.pop(folder.path, None)
        return True
    if any(map(_is_queued, folders)):
        return True
    if len(folders) > 1 and not folders[-1].exists() and _is_recent(folders):
        return True
    return _is_on_slurm(run.folder) and _has_living_job(run)


def working_process(run: Waited) -> int | None:
    """The process on this machine that holds the run now; None where it is this one."""
    folders = folders_of(run) if isinstance(run, Run) else [RunFolder(run.path)]
    held = [holder(one) for one in folders if is_held(one)]
    return next((int(pid) for pid in held if pid.isdigit() and int(pid) != os.getpid()), None)


def says_more(run: Waited, pid: int) -> bool:
    """Whether the process ``pid``, which held the run until it was over, is still there: a command
    prints and draws then what came of it. A program that called Muster, or an experiment that has
    other phases, is not waited for.
    """
    if isinstance(run, Run):
        whole = run.folder.whole
        if not run.stored.argv or ExperimentFolder(whole.parent).is_held():
            return False
    return is_alive(pid)


def _is_queued(folder: RunFolder) -> bool:
    """Whether a start of it waits for GPUs, or has got them and is about to take the lock."""
    # A stranger of the same name would be waited for until it ends.
    if (pid := waiting_process(folder.path, by_name=False)) is not None:
        if folder.exists() and Run(folder.path).status().state == "done":
            return False  # a start of it would find nothing to do, or begin anew
        _QUEUED[folder.path] = pid, time.monotonic()
        return True
    pid, seen_s = _QUEUED.get(folder.path, (0, 0.0))
    return pid > 0 and time.monotonic() - seen_s < _BETWEEN_STAGES_S and is_alive(pid)


def _has_living_job(run: Run) -> bool:
    """Whether its job, or an element of its array, lives; also True while SLURM does not answer."""
    job, array = None, array_of(run, asks_slurm=False)
    if array is not None and array.num_running:
        return True
    with suppress(SetupError):  # a record that is damaged
        job = read_job(run.folder)
    try:
        if job is not None and job_status(job["job_id"]).is_alive:
            return True
        return array is not None and any(
            one.is_alive for one in elements_of(run.folder.array_name).values()
        )
    except RefusedError:  # there is no SLURM on this machine
        return False
    except SetupError:
        return job is not None or _is_sent(run.folder)


def _is_sent(array: RunFolder) -> bool:
    """Of one that is sent by hand, nobody knows whether SLURM has it."""
    from muster.api.slurm.array import read_array

    record = read_array(array)
    return record is not None and record.job_id is not None


def _is_recent(stages: Sequence[RunFolder]) -> bool:
    times = [0.0]
    for stage in stages:
        with suppress(OSError):
            times.append(stage.published_json.stat().st_mtime)
    return time.time() - max(times) < _BETWEEN_STAGES_S


def _is_on_slurm(folder: RunFolder) -> bool:
    return folder.slurm_job.exists() or folder.elements_json.exists()


def what_it_waits_for(run: Waited) -> str:
    """What it waits for: a job that has to begin, GPUs, or a stopped process that has to go on; ""
    where there is nothing, and for an experiment.
    """
    if isinstance(run, ExperimentFolder):
        return ""
    if isinstance(run, QueuedRun):
        held = held_up(RunFolder(run.path), is_running=False)
        return "" if held is None else held.sentence
    job = job_of(run) if _is_on_slurm(run.folder) else None
    if job is not None and job[1].waits:
        return f"waiting for SLURM job {job[0]} ({job[1].reason or 'no reason given'})"
    found = (held_up(one, is_running=is_held(one)) for one in folders_of(run))
    return next((held.sentence for held in found if held is not None), "")


def why_unknown(run: Waited) -> str:
    """That SLURM does not say whether the run's job lives; "" where it does, where there is none,
    and where a process is seen to work on the run."""
    if not isinstance(run, Run) or not _is_on_slurm(run.folder) or is_held(run.folder):
        return ""
    try:
        elements_of(run.folder.array_name)
    except RefusedError:  # there is no SLURM on this machine
        return ""
    except SetupError as error:
        said = str(error).partition("\n")[0]
        return f"{run.path} may be waiting or at work, but SLURM does not answer: {said}"
    return ""


def pause_s(run: Waited) -> float:
    """How long to wait until looking again: SLURM is not asked every moment."""
    is_on_slurm = isinstance(run, Run) and _is_on_slurm(run.folder)
    return _ASK_SLURM_EVERY_S if is_on_slurm else _LOOK_EVERY_S


def latest(run: Run) -> Run:
    """The run; of a map that runs stage by stage the last of its stages that has begun."""
    begun = [folder for folder in folders_of(run) if folder.exists()]
    return Run(begun[-1].path) if begun else run


def end_if_over(run: Waited) -> End | None:
    """What came of a run; None while somebody works on it. Raises what ``end_of`` raises."""
    if is_at_work(run):
        return None
    end = end_of(run)
    return None if is_at_work(run) else end  # somebody may go on with it meanwhile


def end_of(run: Waited) -> End:
    """What came of a run that nobody works on.

    Raises UsageError for one that has not begun, SetupError for one that cannot be read.
    """
    if isinstance(run, QueuedRun):
        how = "it left the queue before it began; the same command waits again"
        return End(EXIT_REQUEUE, f"{run.path}: {how}")
    if isinstance(run, ExperimentFolder):
        return _end_of_phases(run)
    last = latest(run)
    path, status = last.folder.whole, last.status()
    array = array_of(last, asks_slurm=False)
    if array is not None and array.num_begun:
        return _end_of_array(path, status, array)
    lines = last_start(last.folder).lines
    told = [line for line in lines if line.get("event") in ("start", "end", "over")]
    if status.state == "not begun" and not told:
        raise UsageError(
            f"{path} has not begun.", hint=f"start it with: muster resume {shell_word(path)}"
        )
    end = told[-1] if told else {}
    if end.get("event") == "start":
        return End(EXIT_SOME_FAILED, f"{path}: {_KILLED} {_go_on(last)}")
    code = end.get("exit_code")
    if not isinstance(code, int):
        code = _CODES.get(status.state, EXIT_REQUEUE)
    if code == EXIT_OK and path != last.path:
        return End(EXIT_REQUEUE, f"{path}: stopped between two stages; {_go_on(last)}")
    if end.get("error"):
        return End(code, f"{path}: {end['error']}")
    if code in (EXIT_REQUEUE, EXIT_INTERRUPTED) and status.state not in ("cancelled", "done"):
        limits = [str(line.get("text")) for line in lines if line.get("event") == "limit"]
        why = f" ({limits[-1].partition(PAUSES)[0]})" if limits else ""
        how = "saved, and stopped" if status.state == "saved" else status.state
        return End(code, f"{path}: {how} before all was done{why}; {_go_on(last)}")
    if code != EXIT_OK and status.state != "cancelled":
        why = f"muster why {shell_word(path)}"
        return End(code, f"{path}: {status.state}; see why: {why}")
    return End(code, f"{path}: {status.state}")


def _end_of_phases(experiment: ExperimentFolder) -> End:
    state, path = state_of_all(experiment.status(), is_running=False), experiment.path
    if state == "done":
        return End(EXIT_OK, f"{path}: done")
    go_on = f"go on: muster resume {shell_word(path)}"
    lines = list(read_journal(experiment.journal))
    last = lines[-1] if lines else {}
    event, code = last.get("event"), last.get("exit_code")
    if event in ("start", "begin"):
        return End(EXIT_SOME_FAILED, f"{path}: {_KILLED} {go_on}")
    if event == "over" and code == EXIT_OK and state == "failed":
        return End(EXIT_OK, f"{path}: done, apart from phases that may fail")
    if event != "over" or not isinstance(code, int) or code == EXIT_OK:
        code = _CODES.get(state, EXIT_REQUEUE)
    return End(code, f"{path}: {state}; {go_on}")


def _end_of_array(path: Path, status: Status, array: ArrayProgress) -> End:
    state = word_of(status, array)
    if state != "not collected":
        return End(_CODES.get(state, EXIT_REQUEUE), f"{path}: {state}")
    collect = f"bring the results here: muster collect {shell_word(path)}"
    ended = {one: number for one, number in array.counts.items() if one.is_final}
    if sum(ended.values()) < status.total:
        return End(EXIT_REQUEUE, f"{path}: stopped before all was done; {collect}")
    if ended.get(TaskState.FAILED) or ended.get(TaskState.CANCELLED):
        return End(EXIT_SOME_FAILED, f"{path}: failed; {collect}")
    return End(EXIT_OK, f"{path}: done; {collect}")


_KILLED = "it was killed, or its machine went down. What was finished is saved;"

#: What an older muster has not written down.
_CODES: dict[str, int] = {
    "done": EXIT_OK, "failed": EXIT_SOME_FAILED, "cancelled": EXIT_SOME_FAILED,
    "not written": EXIT_SOME_FAILED,
}  # fmt: skip


def _go_on(run: Run) -> str:
    if run.stored.is_program or not run.stored.argv:
        return "the command that began it goes on with it"
    return f"go on: muster resume {shell_word(run.folder.whole)}"
