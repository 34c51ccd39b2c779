"""Tells a run folder from its copies.

A copy has the same run id as its original. So what a run has outside of its folder, such as its
processes and a ledger on a local disk, is named after the folder instead, whose id is kept in a
file together with the inodes of the folder and of that file: no copy has the same.
"""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import NamedTuple

from muster.base.atomic_files import explain_os_error, replacing
from muster.run.folder import RunFolder


class FolderId(NamedTuple):
    """``is_new_copy``: this folder was copied, or moved to another disk, since the last start."""

    text: str
    is_new_copy: bool = False


def own_id(folder: RunFolder) -> FolderId:
    """The id of this very folder, drawn at the first call. The caller holds its lock.

    A folder that moves within its file system keeps its id. A copy gets a new one, and loses what
    was assigned to the pilots of the original. Raises SetupError where it cannot be written.
    """
    if (known := known_id(folder)) is not None:
        return FolderId(known)
    record, drawn = _read(folder.identity_json), uuid.uuid4().hex
    try:
        if record is not None:
            folder.pilot_assignment.unlink(missing_ok=True)  # pilots of the original serve that one
        with replacing(folder.identity_json) as beside:
            values = {"id": drawn, "inodes": _inodes(folder, beside)}
            beside.write_text(json.dumps(values) + "\n")
    except OSError as error:
        raise explain_os_error(error, "write", folder.identity_json) from error
    return FolderId(drawn, is_new_copy=record is not None)


def known_id(folder: RunFolder) -> str | None:
    """The folder's id; None where none was drawn for this very folder. It changes nothing."""
    record = _read(folder.identity_json)
    if record is None or record.get("inodes") != _inodes(folder, folder.identity_json):
        return None
    return str(record.get("id"))


def _inodes(folder: RunFolder, file: Path) -> list[int]:
    return [folder.path.stat().st_ino, file.stat().st_ino]


def _read(path: Path) -> dict[str, object] | None:
    try:
        record = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}
