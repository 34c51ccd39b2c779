"""Which of two ledgers to go on with: the one on this host's disk, or the copy in the run folder.

A run folder on a network file system is *home*; the ledger works on a local disk, *away*, and
everything that is acknowledged is shipped home first. Shipments are numbered. An away ledger has a
branch of its own: a run that goes on from host A to B and back leaves a branch on A that has been
overtaken, and its mark says so. The mark is kept in the ledger's own table, so it changes together
with what it describes.

Why at all: SQLite's locks do not hold on network file systems.
"""

from __future__ import annotations

import json
import os
import sqlite3
import stat
from collections.abc import Iterable
from contextlib import closing, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from muster.base.atomic_files import file_system_of, is_remote
from muster.base.errors import LedgerError
from muster.base.settings import Settings
from muster.farm.ledger.connect import explained
from muster.run.folder import RunFolder

_MARK = "mark"


class Mark(NamedTuple):
    """How far a ledger has come.

    ``branch``: drawn anew for every away ledger, "" in a ledger that was never away.
    ``shipments``: the last one begun; ``acknowledged``: the last one known to have arrived.
    ``history``: earlier branches, each with the last of its shipments that is contained here.
    """

    branch: str = ""
    shipments: int = 0
    acknowledged: int = 0
    history: tuple[tuple[str, int], ...] = ()

    def fork(self) -> Mark:
        """The mark of a ledger that is restored from this one."""
        history = (*self.history, (self.branch, self.shipments))
        return Mark(os.urandom(8).hex(), self.shipments, self.shipments, history)

    def contains(self, other: Mark) -> bool:
        """Whether everything that ``other`` has acknowledged is in this ledger too."""
        if other.branch == self.branch:
            return other.acknowledged <= self.shipments
        if other.branch in dict(self.history):
            return other.acknowledged <= dict(self.history)[other.branch]
        if not other.history:
            return False
        # Of a branch that never came home: good as long as it has acknowledged nothing of its own.
        *before, (branch, parted_at) = other.history
        parent = Mark(branch, parted_at, parted_at, tuple(before))
        return other.acknowledged <= parted_at and self.contains(parent)


class Choice(StrEnum):
    AWAY = "away"
    HOME = "home"
    REFUSED = "refused"


def choose(home: Mark, away: Mark) -> Choice:
    """The ledger to go on with: one that has everything the other has acknowledged.

    >>> started_here = Mark("a", 7, 7)
    >>> gone_on_elsewhere = Mark("b", 9, 9, (("a", 7),))
    >>> choose(home=gone_on_elsewhere, away=started_here).value
    'home'
    >>> choose(home=started_here, away=Mark("a", 8, 7)).value
    'away'
    >>> choose(home=gone_on_elsewhere, away=Mark("a", 9, 9)).value
    'refused'
    """
    arrived = home._replace(acknowledged=home.shipments)
    if away.contains(arrived):
        return Choice.AWAY
    return Choice.HOME if home.contains(away) else Choice.REFUSED


def read_mark(database: sqlite3.Connection) -> Mark:
    row = database.execute("SELECT value FROM meta WHERE name = ?", (_MARK,)).fetchone()
    if row is None:
        return Mark()
    branch, shipments, acknowledged, history = json.loads(row[0])
    return Mark(branch, shipments, acknowledged, tuple((name, at) for name, at in history))


def stored(mark: Mark) -> tuple[str, str]:
    """The name and the value under which a ledger keeps its mark."""
    return _MARK, json.dumps(mark)


def mark_of(path: Path) -> Mark:
    """The mark of a ledger that nobody has open."""
    with explained(path, "read"), closing(sqlite3.connect(path)) as database:
        return read_mark(database)


class Shipment(NamedTuple):
    """Lines of one commit. An earlier muster wrote them without branch and number."""

    branch: str
    number: int
    lines: tuple[Any, ...]


def following(mark: Mark, shipments: Iterable[Shipment]) -> tuple[Mark, list[Any]]:
    """The lines that come after a snapshot with this mark, and the mark with them.

    A kill between a snapshot and the removal of the segment leaves lines that the snapshot has; a
    coordinator that was thought dead may have added some of its own branch.
    """
    lines: list[Any] = []
    number = mark.shipments
    for shipment in shipments:
        if not shipment.branch:
            lines += shipment.lines
        elif shipment.branch == mark.branch and shipment.number == number + 1:
            lines += shipment.lines
            number += 1
    return mark._replace(shipments=number), lines


def both_moved(home: Path, away: Path) -> LedgerError:
    return LedgerError(
        f"Two ledgers of this run have gone on apart from each other: {home}, which another host "
        f"has worked on, and {away} on this one, which holds results that the other never got. "
        "Neither is overwritten.",
        hint=f"to go on with the run folder's, move {away} aside; to go on with this host's, move "
        f"{home} and {home.with_suffix('.segment')} aside. What only the other one "
        "holds is computed again.",
    )


@dataclass(frozen=True, kw_only=True)
class LedgerPlace:
    """``path`` is where the coordinator works; ``is_away`` when that is not the run folder."""

    path: Path
    is_away: bool = False
    reason: str = ""


def choose_place(folder: RunFolder, folder_id: str, settings: Settings) -> LedgerPlace:
    """The run folder itself, or a folder on a local disk when the run folder's disk is remote.

    That one is made, for this user alone. ``folder_id``: of the run folder and none of its copies.
    Raises LedgerError when no local disk can be found, or when the folder is somebody else's.
    """
    if settings.ledger_folder is not None:
        path = _private(settings.ledger_folder, settings) / folder_id / "ledger.sqlite"
        return LedgerPlace(path=path, is_away=True, reason="MUSTER_LEDGER_DIR is set")
    kind = file_system_of(folder.path.absolute())
    if not is_remote(kind):
        return LedgerPlace(path=folder.ledger)
    for candidate in (settings.state_folder, Path("/var/tmp")):
        if not is_remote(file_system_of(candidate)):
            path = _private(candidate, settings) / folder_id / "ledger.sqlite"
            reason = f"{folder.path} is on a network file system ({kind})"
            return LedgerPlace(path=path, is_away=True, reason=reason)
    raise LedgerError(
        f"{folder.path} is on a network file system ({kind}) and so are {settings.state_folder} "
        "and /var/tmp; the ledger needs a local disk.",
        hint="name a folder on one with MUSTER_LEDGER_DIR.",
    )


def _private(base: Path, settings: Settings) -> Path:
    """A folder below ``base``, which may be shared, that is this user's and nobody else's."""
    if not hasattr(os, "getuid"):
        return base / f"muster-{settings.user}"
    path = base / f"muster-{os.getuid()}"
    try:
        base.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
        found = path.lstat()  # not through a link that somebody has planted
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise LedgerError(
                f"The ledger needs a folder of your own, and {path} is not yours (user id "
                f"{found.st_uid}).",
                hint="name another place on a local disk with MUSTER_LEDGER_DIR, and tell your "
                "administrator.",
            )
        if found.st_mode & 0o077:
            path.chmod(0o700)
    except OSError as error:
        raise LedgerError(
            f"The ledger needs a folder on a local disk, and {path} cannot be made: "
            f"{error.strerror}.",
            hint="name another place with MUSTER_LEDGER_DIR.",
        ) from error
    return path
