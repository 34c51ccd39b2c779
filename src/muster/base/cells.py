"""Functions and classes of notebook cells as files that other processes can import.

A snapshot of their source is staged in a folder of this process: which run it is for follows from
what is in it. The session that holds the run writes it into the run folder.
"""

from __future__ import annotations

import atexit
from functools import cache
from hashlib import sha256
from pathlib import Path

from muster.base.atomic_files import write_atomic

#: A snapshot lies in ``cells/NAME/notebook_cell.py`` of a run folder.
FILE, FOLDER = "notebook_cell.py", "cells"


def stage(name: str) -> str:
    """Write the snapshot of what is called ``name`` in this notebook; returns the file's path,
    which goes with this process: `placed` and `place` bring it into a run folder."""
    from muster.base.cell_snapshot import snapshot  # of no use to workers, nor to commands

    source = snapshot(name)
    digest = sha256(source.encode()).hexdigest()[:16]
    path = _stage() / digest / FOLDER / name / FILE
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, source.encode())
    return str(path)


#: From a place in a run folder to the staged file that belongs there.
_to_place: dict[Path, Path] = {}


def placed(target: str, folder: Path) -> str:
    """Where a staged snapshot, or ``FILE:NAME`` in it, will be in the run folder ``folder``; any
    other target as it is. `place` brings it there."""
    head, file, attribute = target.rpartition(FILE)
    staged = Path(head) / FILE
    if not file or not _stage.cache_info().currsize or not staged.is_relative_to(_stage()):
        return target
    place_there = folder.absolute() / FOLDER / staged.parent.name / FILE
    _to_place[place_there] = staged
    return f"{place_there}{attribute}"


def place(folder: Path) -> None:
    """Write what was said to belong into the run folder, which the caller holds."""
    for to in [one for one in _to_place if one.parents[2] == folder.absolute()]:
        to.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(to, _to_place.pop(to).read_bytes())


def moved_with(location: str, folder: Path) -> str:
    """A snapshot's place in its run folder, where the folder is now."""
    return str(folder.absolute() / name_of(location)) if is_snapshot(location) else location


def is_snapshot(location: str) -> bool:
    return Path(location).parts[-3::2] == (FOLDER, FILE)


def name_of(target: str) -> str:
    """A snapshot without the folder that it is in; any other target as it is."""
    is_cell = is_snapshot(target.rpartition(FILE)[0] + FILE)
    return "/".join(Path(target).parts[-3:]) if is_cell else target


@cache
def _stage() -> Path:
    import shutil
    import tempfile

    folder = Path(tempfile.mkdtemp(prefix="muster-cells-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
