"""How a rank's program ends, left where the launcher finds it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, NamedTuple

from muster.base.atomic_files import disk_error, explain_os_error
from muster.base.codec import write_json
from muster.base.errors import EXIT_REQUEUE, MusterError
from muster.rank.process_group import Gang
from muster.run.folder import RunFolder


class Ending(NamedTuple):
    """``finished``: the training is over; ``requeue``: it was asked to stop and has saved."""

    kind: Literal["finished", "requeue"]
    why: str


class StartAgain(MusterError):
    """Not an end: the launcher starts the gang again."""


@contextmanager
def refusals_told(folder: RunFolder) -> Iterator[None]:
    """A user's mistake goes to where the launcher finds it, without a traceback."""
    try:
        yield
    except MusterError as error:
        _tell(folder, error)
        raise SystemExit(error.exit_code) from None
    except Exception as error:
        found = disk_error(error)
        if found is None:
            raise
        place = Path(found.filename) if isinstance(found.filename, str) else folder.path
        explained = explain_os_error(found, "write", place)
        _tell(folder, explained)
        raise SystemExit(explained.exit_code) from error


def _tell(folder: RunFolder, error: MusterError) -> None:
    kind = "restart" if isinstance(error, StartAgain) else "refused"
    word = {"message": str(error), "exit_code": error.exit_code}
    with suppress(OSError):  # the disk may be too full even for this
        write_json(folder.ending_json, {"ending": kind, **word})


def leave_word(folder: RunFolder, gang: Gang, step: int, total_steps: int | None = None) -> None:
    """Tell the launcher that this was no failure and no end: the same command goes on."""
    if gang.is_first:
        word = {"ending": "requeue", "step": step, "total_steps": total_steps}
        write_json(folder.ending_json, {**word, "exit": EXIT_REQUEUE})
    gang.council.meet()


def tell_finished(folder: RunFolder, gang: Gang) -> None:
    """Everything is written: a signal that comes from now on has nothing to interrupt."""
    if gang.is_first:
        write_json(folder.ending_json, {"ending": "finished"})


def forget_word(folder: RunFolder, gang: Gang) -> None:
    """The word of a start that was ended and started again is not this one's."""
    if gang.is_first:
        folder.ending_json.unlink(missing_ok=True)
