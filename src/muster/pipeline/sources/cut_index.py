"""Where an input is cut, in a file: looked for once, read lazily, found again at the next start."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from muster.base.atomic_files import replacing
from muster.pipeline.sources.formats import Cut

_WIDTH = 5  # 64-bit numbers per piece
_AT_ONCE = 4096


class Piece(NamedTuple):
    """A cut of file number ``file``; ``first`` counts rows over all files."""

    file: int
    first: int
    cut: Cut


class CutIndex:
    """The pieces of an input in its order; memory does not depend on how many there are."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._num_pieces = path.stat().st_size // (8 * _WIDTH)

    def __len__(self) -> int:
        return self._num_pieces

    def __iter__(self) -> Iterator[Piece]:
        import numpy as np

        with self._path.open("rb") as stream:
            while block := stream.read(8 * _WIDTH * _AT_ONCE):
                for row in np.frombuffer(block, "<i8").reshape(-1, _WIDTH).tolist():
                    yield _piece(row)

    def __getitem__(self, number: int) -> Piece:
        import numpy as np

        with self._path.open("rb") as stream:
            stream.seek(8 * _WIDTH * number)
            return _piece(np.frombuffer(stream.read(8 * _WIDTH), "<i8").tolist())

    @property
    def num_rows(self) -> int:
        if not self._num_pieces:
            return 0
        last = self[self._num_pieces - 1]
        return last.first + last.cut.num_rows


def cut_index(folder: Path, identity: str, pieces: Iterable[Piece]) -> CutIndex:
    """The index for ``identity``; ``pieces`` are only asked for when it is not there yet."""
    import numpy as np

    name = hashlib.blake2b(identity.encode(), digest_size=8).hexdigest()
    path = folder / f"cuts-{name}.bin"
    if path.exists():
        return CutIndex(path)
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary, temporary.open("wb") as stream:
        waiting: list[tuple[int, ...]] = []
        for piece in pieces:
            waiting.append((piece.file, piece.first, *piece.cut))
            if len(waiting) == _AT_ONCE:
                stream.write(np.array(waiting, "<i8").tobytes())
                waiting = []
        stream.write(np.array(waiting, "<i8").tobytes())
    return CutIndex(path)


def _piece(row: list[int]) -> Piece:
    file, first, count, place, line = row
    return Piece(file, first, Cut(count, place, line))
