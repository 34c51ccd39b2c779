"""Files and log parts as frames, for workers that do not see the run folder.

Places are relative to a root that both ends know, with ``/`` between their parts. A file travels
in pieces, so that no end ever holds a whole one, and appears at the other end by rename.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from muster.farm import wire

FILE, FOLDER, LINK, LOG = "file", "folder", "link", "log"
#: What one frame holds of a file.
PIECE_BYTES = 4 << 20
_SUFFIX = ".arriving"

Frame = tuple[list[Any], bytes]


def is_shipped(header: list[Any]) -> bool:
    """Whether a frame of this header is for an ``Unpacker``."""
    return header[0] in (FILE, FOLDER, LINK)


# ---------------------------------------------------------------- packing


def pack_file(path: Path, place: str) -> Iterator[bytes]:
    """The frames of one file as it is when the first is asked for; none if it is gone by then."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        position, piece = 0, file.read(PIECE_BYTES)
        while True:
            following = file.read(PIECE_BYTES)
            yield wire.pack([FILE, place, position, not following, mode], piece)
            if not following:
                return
            position, piece = position + len(piece), following


def pack_folder(folder: Path, place: str) -> Iterator[bytes]:
    """The frames of a folder and all that is in it; links stay links."""
    yield wire.pack([FOLDER, place])
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        inner = f"{place}/{wire.clean(entry.name)}"
        if entry.is_symlink():
            yield wire.pack([LINK, inner], wire.clean(str(Path(entry.path).readlink())).encode())
        elif entry.is_dir():
            yield from pack_folder(Path(entry.path), inner)
        elif entry.is_file():
            yield from pack_file(Path(entry.path), inner)


def pack_log(path: Path, start: int, stop: int, slot_id: int) -> Iterator[bytes]:
    """The bytes from ``start`` to ``stop`` of a worker's log."""
    with path.open("rb") as log:
        log.seek(start)
        while start < stop:
            piece = log.read(min(PIECE_BYTES, stop - start))
            if not piece:
                return
            yield wire.pack([LOG, slot_id, start], piece)
            start += len(piece)


# ---------------------------------------------------------------- unpacking


class Unpacker:
    """Writes shipped frames below ``root``; ``allowed``: the first parts of places it accepts."""

    def __init__(self, root: Path, allowed: Collection[str]) -> None:
        self._root = root
        self._allowed = allowed

    def take(self, header: list[Any], body: bytes) -> str | None:
        """Write a frame; the place of what is whole with it, None while more is to come.

        Raises ValueError for a place outside of ``root`` or of what is allowed.
        """
        path = self._path(header[1])
        path.parent.mkdir(parents=True, exist_ok=True)
        match header[0]:
            case "folder":
                if self._is_link(path):  # sent earlier, when there was no folder
                    path.unlink()
                path.mkdir(exist_ok=True)
            case "link":
                if path.parent == self._root:
                    raise _stray(header[1])  # all that is allowed would lie behind it
                path.unlink(missing_ok=True)
                path.symlink_to(body.decode())
            case "file":
                _, _, position, is_last, mode = header
                arriving = path.with_name(path.name + _SUFFIX)
                how = os.O_WRONLY | os.O_NOFOLLOW | (0 if position else os.O_CREAT | os.O_TRUNC)
                with os.fdopen(os.open(arriving, how, 0o666), "wb") as file:
                    file.seek(position)
                    file.write(body)
                    if is_last:
                        file.flush()
                        os.fchmod(file.fileno(), mode & 0o777)
                        os.fsync(file.fileno())
                if not is_last:
                    return None
                os.replace(arriving, path)
        return str(header[1])

    def _path(self, place: str) -> Path:
        pure = PurePosixPath(place)
        is_inside = not pure.is_absolute() and ".." not in pure.parts
        if not (is_inside and pure.parts and pure.parts[0] in self._allowed):
            raise _stray(place)
        path = self._root.joinpath(*pure.parts)
        # Nothing is packed from behind a link, and one that was sent may lead anywhere.
        if any(
            self._is_link(self._root.joinpath(*pure.parts[:n])) for n in range(2, len(pure.parts))
        ):
            raise _stray(place)
        return path

    def _is_link(self, path: Path) -> bool:
        """Whether it is one that was sent: the folders of ``allowed`` are never."""
        return path.parent != self._root and path.is_symlink()


def _stray(place: str) -> ValueError:
    return ValueError(f"a worker sent a file for {place!r}, where none belongs")


def write_log(path: Path, position: int, body: bytes) -> None:
    """Put a part of a log where it belongs; what was there of an earlier part is replaced."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        os.pwrite(descriptor, body, position)
    finally:
        os.close(descriptor)
