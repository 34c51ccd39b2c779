"""Runs as they are listed: which there are, and the state of each in one word, also where SLURM
or the elements of an array know more of it. `why` says more, and takes longer to load than to
answer.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from muster.api.runs import Run, Status
from muster.api.start.queued_starts import process_to_end, waiting_process
from muster.base.codec import read_object
from muster.base.errors import SetupError, UnknownNameError, UsageError
from muster.base.processes import is_stopped
from muster.base.shown_text import shell_word
from muster.run.folder import EXPERIMENT_FILE, RunFolder
from muster.run.session import stopped_process
from muster.run.state import Word, state_of_array
from muster.slurm.commands import living_job, read_job
from muster.slurm.states import JobStatus

if TYPE_CHECKING:
    from muster.api.slurm.array import ArrayProgress

_ROOT = Path("runs")


def find_runs(root: Path) -> list[Run]:
    """The runs directly below ``root``, the one that worked last first."""
    try:
        folders = [RunFolder(path) for path in root.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise SetupError(f"Cannot look for runs in {root}: {error.strerror}.") from None
    runs = [Run(folder.path) for folder in folders if folder.exists()]
    return sorted(runs, key=lambda run: run.folder.last_at_work_s, reverse=True)


def places_of(text: str) -> tuple[Path, Path]:
    """Where a run may have its folder that is named by this path, or by its name below ``runs``."""
    return Path(text), _ROOT / text


def find_begun(text: str) -> Run | None:
    """A run by its path, or by its name below ``runs``; None where there is none so far."""
    return next((Run(path) for path in places_of(text) if RunFolder(path).exists()), None)


def find_run(text: str) -> Run:
    """The same; UsageError with the nearest name where there is none."""
    if (run := find_begun(text)) is not None:
        return run
    if (stage := find_first_stage(text)) is not None:
        raise UsageError(
            f"{stage.folder.whole} is a map that runs stage by stage, and its last stage has not "
            "begun.",
            hint=f"go on with it: muster resume {shell_word(stage.folder.whole)}; "
            f"look at its first stage: muster status {shell_word(stage.path)}",
        )
    for path in places_of(text):
        if (path / EXPERIMENT_FILE).is_file():
            listed = ", ".join(sorted(str(run.path) for run in find_runs(path))) or "none has begun"
            raise UsageError(
                f"{path} is an experiment of several phases, each of which is a run.",
                hint=f"name one of them: {listed}; "
                f"`muster status {shell_word(path)}` shows them all.",
            )
    for path in places_of(text):
        if (pid := waiting_process(path)) is not None:
            ends = f"kill {pid}"
            if process_to_end(path) is not None:
                ends = f"muster cancel {shell_word(text)}"
            raise UsageError(
                f"{text} has not begun: a run of this name waits for GPUs, in process {pid}.",
                hint=stopped_sentence(pid)
                or f"its place is in `muster queue`; to take it out of the queue: {ends}",
            )
    where = "Others are named by their folder; muster list --root DIR shows those in it."
    if (root := Path(text)).is_dir() and find_runs(root):
        where = f"That folder holds runs and is none: muster list --root {shell_word(root)}"
    elif root.exists():
        where = f"That {'folder' if root.is_dir() else 'file'} is no run."
    raise UnknownNameError("run", text, [str(run.path) for run in find_runs(_ROOT)], where)


class HeldUp(NamedTuple):
    """What keeps a run from going on that its own files do not say."""

    word: Literal["suspended", "queued"]
    sentence: str
    pid: int

    @property
    def command(self) -> str:
        """What to type next."""
        return "muster queue" if self.word == "queued" else f"kill -CONT {self.pid}"


def held_up(folder: RunFolder, *, is_running: bool) -> HeldUp | None:
    """Its process is stopped, or its next start waits in the queue; None where neither is so."""
    if is_running:
        pid = stopped_process(folder)
        return HeldUp("suspended", _stopped(pid), int(pid)) if pid else None
    if (waits := waiting_process(folder.whole)) is None:
        return None
    sentence = f"a run of this name waits for GPUs, in process {waits} (muster queue)"
    if stopped := stopped_sentence(waits):
        sentence += f"; {stopped}"
    return HeldUp("queued", sentence, waits)


def held_up_now(folder: RunFolder, found: Status) -> HeldUp | None:
    """The same of a run that stands so; nothing keeps one that is done."""
    return None if found.state == "done" else held_up(folder, is_running=found.is_running)


def stopped_sentence(pid: int) -> str:
    """That this process is stopped, and how it goes on; "" where it is not."""
    return _stopped(pid) if is_stopped(pid) else ""


def _stopped(pid: str | int) -> str:
    return f"its process is stopped (Ctrl-Z); to let it go on: kill -CONT {pid}"


def find_first_stage(text: str) -> Run | None:
    """The first stage of a map that runs stage by stage and has only stages so far, else None.

    The record of that stage has the whole command.
    """
    for path in places_of(text):
        folder = RunFolder(RunFolder(path).stage(0))
        if folder.exists() and not RunFolder(path).exists():
            return Run(folder.path)
    return None


def array_of(run: Run, *, asks_slurm: bool) -> ArrayProgress | None:
    """Of a run with --array, which has no coordinator; None for any other."""
    if not run.folder.elements_json.exists():
        return None
    from muster.api.slurm.array import array_progress

    return array_progress(run.folder, asks_slurm=asks_slurm)


def job_of(run: Run) -> tuple[str, JobStatus] | None:
    """Of a run that was handed in to SLURM, its job while that lives, as far as one can ask."""
    with suppress(SetupError):
        return living_job(run.folder)
    return None


def ended_job(run: Run, found: Status, job: tuple[str, JobStatus] | None) -> str | None:
    """The job that should have begun the run and does not live; None where one cannot tell."""
    with suppress(SetupError):
        if found.state == "not begun" and job is None and living_job(run.folder) is None:
            record = read_job(run.folder)
            return None if record is None else str(record["job_id"])
    return None


def word_of(
    found: Status, array: ArrayProgress | None, job: tuple[str, JobStatus] | None = None
) -> Word:
    """The state of a run, also where SLURM or the elements of an array know more than it does."""
    if job is not None and job[1].waits and found.state == "not begun":
        return "queued"
    if array is None:
        return found.state
    num_open = found.counts["waiting"] + found.counts["running"]
    return state_of_array(
        found.state, num_open=num_open, num_running=array.num_running, num_queued=array.num_queued
    )


def rejected_by(run: Run, *, if_published: bool = False) -> int | None:
    """How many records a map has rejected, by all of its stages: it ends with 1 then, though no
    attempt has failed. None of a run of another kind, and where its files cannot be read.

    ``if_published``: None as well of a map that is not finished, of which every chunk is asked.
    """
    if not run.stored.is_map:
        return None
    from muster.api.maps.publish import tally
    from muster.api.report.map import stage_folders

    def of(stage: RunFolder) -> int | None:
        known = read_object(stage.published_json).get("rejected")
        if isinstance(known, int):
            return known
        return None if if_published else tally(stage).num_rejected

    try:
        numbers = [of(stage) for stage in stage_folders(run.folder)]
    except (OSError, ValueError, LookupError):  # what can be read of the run is shown all the same
        return None
    return sum(number for number in numbers if number) if None not in numbers else None
