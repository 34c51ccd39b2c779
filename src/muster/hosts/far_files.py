"""What a far end does beside ``far_program`` for whoever brings the files of a start home.

It is imported on the host (``use``), as that is, and knows the folder of the start from it.
"""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

#: What tells a file from another state of it: size, time of its last change, inode.
SIGN = struct.Struct("<qqQ")
HELD = "held"


def calls(folder: list[str]) -> dict[str, Callable[..., Any]]:
    """The far end's further calls. ``folder``: of the start, once there is one."""
    return {
        "read": lambda place, position, size: read(Path(folder[0], place), position, size),
        "digest": lambda place, size: digest(Path(folder[0], place), size),
        "hold": lambda name: hold(Path(folder[0]), name),
    }


def read(path: Path, position: int, size: int) -> bytes:
    """The sign of a file and what follows ``position``, together at most so many bytes; nothing
    where it is gone, or is being written."""
    with suppress(OSError), path.open("rb") as file:
        before = _sign(file.fileno())
        file.seek(position)
        data = file.read(size - SIGN.size)
        if _sign(file.fileno()) == before:
            return before + data
    return b""


def digest(path: Path, size: int) -> str:
    """Of the first so many bytes of a file; "" where it has not as many."""
    found = sha256()
    with suppress(OSError), path.open("rb") as file:
        while size > 0 and (data := file.read(min(size, 1 << 20))):
            found.update(data)
            size -= len(data)
    return "" if size else found.hexdigest()


def hold(folder: Path, name: str) -> bool:
    """Keep a checkpoint in ``HELD`` until another one is held: while it is on its way, it may be
    removed as the program saves others. False where that cannot be done."""
    held = folder / HELD
    shutil.rmtree(held, ignore_errors=True)
    try:
        held.mkdir()
        for path in (folder / "run" / "checkpoints" / name).iterdir():
            os.link(path, held / path.name)
    except OSError:
        return False
    return True


def _sign(number: int) -> bytes:
    about = os.fstat(number)
    return SIGN.pack(about.st_size, about.st_mtime_ns, about.st_ino)
