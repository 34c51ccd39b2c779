"""The first parts of an output, written while the others are still being made.

They are in a temporary file beside the output, checked as `merge` checks them, and `merge` takes it
over. Nothing relies on that file: after a kill the merge begins anew from the parts, and so it does
after an error here or when the disk becomes short, which removes the file.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from muster.base.atomic_files import sweep
from muster.base.errors import MusterError
from muster.pipeline.apart import Call, told
from muster.pipeline.sinks.formats import SinkSpec, prepare_place
from muster.pipeline.sinks.merge import Written, explained, write_the_output
from muster.pipeline.sinks.parts import Part, blocks
from muster.pipeline.sources.columnar import Again

if TYPE_CHECKING:
    from muster.pipeline.sinks.columnar import ParquetEncoder

#: What this leaves free for the workers and the ledger, at least.
_RESERVE_BYTES = 1 << 30
#: How many times the rows that are there may have been written in vain. A table of which each
#: chunk has a column of its own would be begun with each of them.
_MOST_IN_VAIN = 3


class Ahead:
    """The first parts of a file of JSON lines, copied."""

    def __init__(self, spec: SinkSpec, shards: Sequence[int]) -> None:
        """``shards``: the number of rows of each."""
        self._spec, self._shards = spec, shards
        self._path = spec.path.with_name(f".{spec.path.name}.{secrets.token_hex(4)}.tmp")
        self._parts: list[Part] = []
        self._size = 0
        self._order = self._row = 0  # the shard of the next part, and its first row; -1: no more

    @property
    def has_begun(self) -> bool:
        """Whether there is a file, which `sweep` must not take for one that a kill has left."""
        return bool(self._parts)

    def add(self, part: Part) -> bool:
        """Take a part if it follows those that are there. Raises what `merge` raises for it."""
        if (part.order, part.start) != (self._order, self._row):
            return False
        with self._whole_or_gone():
            if not self.has_begun:
                prepare_place(self._spec)
                sweep(self._spec.path)
                self._path.touch()
            self._check_room(part.num_bytes)
            if not self._take(part):
                return False
        self._parts.append(part)
        self._size += part.num_bytes
        self._row = part.stop
        while self._order < len(self._shards) and self._row == self._shards[self._order]:
            self._order, self._row = self._order + 1, 0
        return True

    def _take(self, part: Part) -> bool:
        """Add a part to the file; False: not now."""
        with self._path.open("ab") as file:
            for block in blocks(part):
                file.write(block)
        return True

    def sync(self) -> None:
        """Have what is there on the disk, so that little is left to write at the end."""
        if self.has_begun:
            with self._whole_or_gone():
                self._check_room(0)
                with self._path.open("r+b") as file:
                    os.fsync(file.fileno())

    def _check_room(self, num_bytes: int) -> None:
        """Raise ENOSPC where a copy of ``num_bytes`` would take what the others need."""
        # Parquet also has what was left in the input, of which the parts do not tell.
        written = max(self._size, self._path.stat().st_size)
        wanted = num_bytes + max(_RESERVE_BYTES, written)
        if shutil.disk_usage(self._path.parent).free < wanted:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))

    @contextmanager
    def _whole_or_gone(self) -> Iterator[None]:
        """After an error inside, whatever is in the file is not to be relied upon."""
        try:
            with explained(self._spec.path):
                yield
        except BaseException:
            self.discard()
            raise

    def hand_over(self, temporary: Path, parts: Sequence[Part], spec: SinkSpec) -> Written | None:
        """Rename what is there to ``temporary``, and write what is missing of ``parts``. None, and
        no file, where what is there is not of use for them.
        """
        if self.has_begun and self._serves(parts, spec) and self._is_moved(temporary, self._size):
            return write_the_output(parts[len(self._parts) :], spec, temporary)
        self.discard()  # first of all: the merge may need its room
        return None

    def _serves(self, parts: Sequence[Part], spec: SinkSpec) -> bool:
        return list(parts[: len(self._parts)]) == self._parts and spec == self._spec

    def _is_moved(self, temporary: Path, size: int) -> bool:
        """Rename the file, if it has the bytes that it should have."""
        with suppress(FileNotFoundError):  # somebody has cleaned up
            if self._path.stat().st_size == size:
                os.replace(self._path, temporary)
                return True
        return False

    def discard(self) -> None:
        """Remove what was not handed over, and copy nothing more."""
        self._order, self._parts = -1, []
        with suppress(OSError):  # `sweep` tries it again
            self._path.unlink(missing_ok=True)


class AheadInParquet(Ahead):
    """The first parts of a Parquet file, written by another process, which ends with the thread
    that has made this.
    """

    def __init__(self, spec: SinkSpec, shards: Sequence[int]) -> None:
        super().__init__(spec, shards)
        self._call = Call(write_what_is_told, spec, self._path)

    def _take(self, part: Part) -> bool:
        if self._call.has_ended:  # its file is of no use, and takes room
            self.discard()
            return False
        if not self._call.has_room:
            return False
        self._call.tell(part)
        return True

    def hand_over(self, temporary: Path, parts: Sequence[Part], spec: SinkSpec) -> Written | None:
        if self._order >= 0 and self._serves(parts, spec):
            with suppress(MusterError, OSError):  # the merge meets it again
                for part in parts[len(self._parts) :]:
                    self._call.tell(part)
                written = self._call.result()
                if written is not None and self._is_moved(temporary, written[0]):
                    return written
        self.discard()
        return None

    def discard(self) -> None:
        self._call.end()
        super().discard()


def serves(spec: SinkSpec) -> bool:
    """Whether an output can be written in the order of its parts before all are there."""
    return spec.format in _KINDS and not spec.is_folder


def ahead_of(spec: SinkSpec, shards: Sequence[int]) -> Ahead:
    """``shards``: the number of rows of each. The calling thread must live as long as this."""
    return _KINDS[spec.format](spec, shards)


_KINDS: dict[str, type[Ahead]] = {"jsonl": Ahead, "parquet": AheadInParquet}


# ---------------------------------------------------------------------- Parquet


def write_what_is_told(spec: SinkSpec, place: Path) -> Written | None:
    """For a `Call`: write Parquet of the parts that it is told of, in their order."""
    return write_as_they_come(told(), spec, place)


def write_as_they_come(coming: Iterator[Part], spec: SinkSpec, place: Path) -> Written | None:
    """Write the file that `merge` would write if it had all parts, which come in their order.
    None where that cannot be told, because a column has to be read a second time, and where it is
    not worth it.

    The types of the columns are those of the parts that are there. They are looked at again as the
    parts become twice as many, and at the end; where they are others, it begins anew, unless
    much was written in vain already.
    """
    growing = _Growing(coming, spec)
    encoder, num_in_vain = growing.encoder(), 0
    while encoder is not None and num_in_vain <= _MOST_IN_VAIN * growing.num_rows:
        try:
            with place.open("wb") as file:
                encoder.write(growing.parts(encoder), file)
            return place.stat().st_size, growing.notes()
        except OSError:
            raise
        except Exception as error:  # of a value that does not fit the types of those before it
            fresh = growing.encoder()
            if fresh is not None and fresh.writes_as(encoder):
                if isinstance(error, MusterError):
                    raise
                return None  # the merge meets it again
            num_in_vain += growing.num_rows
            encoder = fresh
    return None


class _OtherTypes(Exception):
    """What was written is not what would be written now."""


class _Growing:
    """Parts that have come, and what is known of their columns."""

    def __init__(self, coming: Iterator[Part], spec: SinkSpec) -> None:
        from muster.pipeline.sinks.survey import Survey

        self._coming, self._spec, self._again = coming, spec, Again(spec.inputs)
        self._declared = dict(spec.columns)
        self._survey = Survey(self._declared, self._again)
        self._there: list[Part] = []
        while not self._survey.columns and self._next() is not None:
            pass  # nothing can be written without a column

    def _next(self) -> Part | None:
        part = next(self._coming, None)
        if part is not None:
            self._survey.add(part)
            self._there.append(part)
        return part

    def encoder(self) -> ParquetEncoder | None:
        """One for what has come; None where that is nothing or has to be read a second time."""
        from muster.pipeline.sinks.columnar import ParquetEncoder

        found = self._survey
        if not self._there or found.apart():
            return None
        metadata = dict(self._spec.metadata)
        return ParquetEncoder(found.columns, self._declared, metadata, found.num_rows, self._again)

    @property
    def num_rows(self) -> int:
        """Of the parts that have come."""
        return self._survey.num_rows

    def notes(self) -> tuple[str, ...]:
        encoder = self.encoder()
        assert encoder is not None
        return encoder.notes

    def parts(self, encoder: ParquetEncoder) -> Iterator[Part]:
        """All parts. Raises _OtherTypes where ``encoder`` is not the one for them."""
        yield from list(self._there)
        checked = len(self._there)
        while (part := self._next()) is not None:
            if len(self._there) >= 2 * checked:
                self._check(encoder)
                checked = len(self._there)
            yield part
        self._check(encoder)

    def _check(self, encoder: ParquetEncoder) -> None:
        fresh = self.encoder()
        if fresh is None or not fresh.writes_as(encoder):
            raise _OtherTypes
