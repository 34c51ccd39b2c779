"""One start of a run: its folder made, its lock held, its record written, its journal kept.

Whatever runs is opened here. The order matters: the record is read and written under the lock, so
that two starts cannot both begin a run, and requests of others are heard only once the record says
what they are about. The lock goes last, so whoever finds a run free finds it whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from muster.base.atomic_files import explain_os_error
from muster.base.clock import SystemClock
from muster.base.errors import (
    EXIT_INTERRUPTED,
    EXIT_SOME_FAILED,
    MusterError,
    PlanMismatchError,
)
from muster.base.journal import Journal
from muster.run.folder import RunFolder
from muster.run.lock import hold
from muster.run.record import RunRecord, read_run, write_run
from muster.run.requests import Mailbox

#: Makes the record that a folder shall have of the one that it has (None: it has none); raises
#: where the run may not begin or go on.
Renew = Callable[[RunRecord | None], RunRecord]


class Session:
    """A start of a run that is under way. ``is_cancelled()``: whether somebody cancels the run."""

    def __init__(self, folder: RunFolder, node: int | None, mailbox: Mailbox | None) -> None:
        self._folder = folder
        self._where = {} if node is None else {"node": node}
        self._mailbox = mailbox
        self._journal: Journal | None = None
        self._has_ended = False

    def is_cancelled(self) -> bool:
        return self._mailbox is not None and self._mailbox.is_cancelled()

    def begin(self, **fields: Any) -> Journal:
        """Write down that the work begins; the journal is for what happens to it."""
        self._journal = Journal(self._folder.events, SystemClock())
        self._journal.write("start", **fields, **self._where)
        return self._journal

    def end(self, **fields: Any) -> None:
        """Write down how it ended, where an exception does not say it."""
        assert self._journal is not None
        self._has_ended = True
        self._journal.write("end", **self._where, **fields)

    def close(self, error: BaseException | None) -> None:
        """``error``: what ends the session, None where nothing does."""
        if self._journal is None:
            return
        if error is not None and not self._has_ended:
            with suppress(OSError):  # the error itself matters more
                self.end(exit_code=_code_of(error))
        self._journal.close()


@contextmanager
def open_run(
    folder: RunFolder, renew: Renew | None = None, *, node: int | None = None
) -> Iterator[Session]:
    """A context in which this process works on ``folder``, and nobody else does.

    ``node``: the number of this node in a gang. Nodes may share the folder, so only the first takes
    the lock, writes the record and hears requests. Leave ``renew`` out to change a run that does
    not go on: then no record is written, and no request is heard.

    Raises SetupError where somebody works on the folder or the disk fails, and what ``renew``
    raises.
    """
    try:
        if renew is not None:
            folder.create()
        with ExitStack() as stack:
            mailbox = None
            if not node:
                stack.enter_context(hold(folder))
                if renew is not None:
                    _renew(folder, renew)
                    mailbox = stack.enter_context(Mailbox(folder))
            session = Session(folder, node, mailbox)
            try:
                yield session
            except BaseException as error:
                session.close(error)
                raise
            session.close(None)
    except OSError as error:
        raise explain_os_error(error, "use the run folder", folder.path) from error


def _renew(folder: RunFolder, renew: Renew) -> None:
    before = read_run(folder) if folder.exists() else None
    if before is None and folder.ledger.exists():
        raise PlanMismatchError(
            f"{folder.path} holds a ledger but no run.json, so what it belongs to is unknown.",
            hint="choose another --run-dir, or restore run.json from a copy.",
        )
    record = renew(before)
    if record != before:
        write_run(folder, record)


def _code_of(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    return error.exit_code if isinstance(error, MusterError) else EXIT_SOME_FAILED
