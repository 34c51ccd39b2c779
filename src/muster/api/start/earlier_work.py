"""What a run folder holds from earlier commands: what did it, and putting it aside."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from muster.base.atomic_files import explain_os_error, sync_folder
from muster.base.code import Code, check_same_code
from muster.base.codec import read_record
from muster.base.errors import MusterError, SetupError, UsageError
from muster.farm.ledger.read import LedgerReader
from muster.farm.task import TaskState
from muster.run.folder import RunFolder
from muster.run.record import Kind, read_run
from muster.run.session import is_held, open_run


def check_code(
    folder: RunFolder, now: Code, as_before: Code | None = None, *, may_change: bool
) -> None:
    """Raise PlanMismatchError where the work in ``folder`` was done by another code than ``now``;
    ``as_before`` as in ``check_same_code``.

    The one rule for runs of every kind. It is no part of opening a run: what counts as work stands
    in ledgers and checkpoints, of which `run` knows nothing, and a dry run asks as well.
    """
    if may_change:
        return
    array = folder.array
    code: Code | None = None
    if array is not None:  # all elements must run the code that the array was sent with
        code = read_run(array).code
    elif folder.exists():
        code = _code_of_work(folder)
    if code is not None:
        check_same_code(code, now, (array or folder).path, as_before)


def _code_of_work(folder: RunFolder) -> Code | None:
    """The code that did the work there; None where no work is done that new code could mix with."""
    stored = read_run(folder)
    if stored.is_program:
        return stored.code if any(folder.logs.glob("rank-*.log")) else None
    if stored.is_gang:
        return (_code_of_checkpoint(folder) or stored.code) if has_trained(folder) else None
    return stored.code if has_results(folder) else None


def has_trained(folder: RunFolder) -> bool:
    """Whether a training has got as far as a checkpoint there."""
    return folder.training_results.exists() or any(folder.checkpoints.glob("step-*"))


def _code_of_checkpoint(folder: RunFolder) -> Code:
    """The code that made the newest checkpoint; empty where no checkpoint says so."""
    paths = folder.checkpoints.glob("step-*/extra.json")
    by_length = sorted(paths, key=lambda path: (len(path.parent.name), path.parent.name))
    for path in reversed(by_length):
        with suppress(MusterError):
            code = read_record(path, "record of a checkpoint", {"code": dict})["code"]
            return {str(name): str(digest) for name, digest in code.items()}
    return {}


def has_results(folder: RunFolder) -> bool:
    """Whether tasks have been worked on there, or rows of a map, also in elements of an array."""
    if folder.parts.exists():  # a map's chunks keep the rows that are done before the chunk is
        return True
    return any(_has_ended(place) for place in (folder, *_elements(folder)))


def _has_ended(folder: RunFolder) -> bool:
    if not folder.ledger.exists():
        return False
    with LedgerReader(folder.ledger) as ledger:
        counts = ledger.counts()
    return counts[TaskState.DONE] + counts[TaskState.STOPPED] > 0


def _elements(folder: RunFolder) -> Iterator[RunFolder]:
    if folder.elements.is_dir():
        yield from (RunFolder(path) for path in folder.elements.iterdir() if path.name.isdigit())


def move_aside(
    folder: RunFolder,
    kind: Kind,
    say: Callable[[str], None] = lambda line: None,
    first: Callable[[], None] = lambda: None,
) -> Path | None:
    """``--restart``: rename a run folder, so that a new run can begin under its name.

    Says and returns where the old run is now, None where there was none. The rename is one step,
    so a kill leaves the old run under its old name or under the new one, and whole. The caller
    opens the new folder afterwards; ``first`` is called under the lock of the old one.

    Raises SetupError while somebody works on the folder, be it a job in a queue, and
    PlanMismatchError for a run of another kind.
    """
    parts = (folder.run_json, folder.ledger, folder.elements, folder.stage(0).parent)
    # A job may still wait in the queue, and the folder may hold nothing but its record.
    if not any(path.exists() for path in (*parts, folder.slurm_job)):
        return None
    if folder.exists():
        read_run(folder).check_kind(kind, folder)
    # A folder that is reached through a link stays where its disk is.
    place = Path(os.path.realpath(folder.path))
    if Path.cwd().is_relative_to(place):
        raise UsageError(
            f"--restart moves {folder.path}, and you are in it.", hint="leave that folder first."
        )
    with open_run(folder):
        _refuse_at_work(folder)
        aside = _free_name(place)
        first()
        folder.lock.with_suffix(".pid").unlink(missing_ok=True)
        os.rename(place, aside)
        sync_folder(aside.parent)
    say(f"the run so far is kept in {aside}")
    return aside


def put_back(aside: Path, folder: RunFolder) -> None:
    """Undo ``move_aside``: what has been written under the name since then is removed."""
    place = Path(os.path.realpath(folder.path))
    try:
        shutil.rmtree(place)
        os.rename(aside, place)
        sync_folder(place.parent)
    except OSError as error:
        raise explain_os_error(error, "rename back", aside) from error


def _free_name(place: Path) -> Path:
    stem = f"{place.name}.before-{time.strftime('%Y%m%d-%H%M%S')}"
    number, path = 1, place.with_name(stem)
    while path.exists():
        number += 1
        path = place.with_name(f"{stem}-{number}")
    return path


def _refuse_at_work(folder: RunFolder) -> None:
    """SetupError where an element or a job may still write to the folder."""
    from muster.slurm.commands import jobs_at_work

    busy = [f"element {element.name}" for element in _elements(folder) if is_held(element)]
    busy += [f"job {job}" for job in jobs_at_work(folder)]
    if busy:
        work = "works" if len(busy) == 1 else "work"
        raise SetupError(
            f"{folder.path} cannot be moved aside: {', '.join(busy[:5])} still {work} on it.",
            hint="end them with scancel, or wait; another --run-dir needs no waiting.",
        )
