"""The journal of a chunk: finished rows, appended to disk as they come.

Guarantees
- What ``add`` was called with survives a kill -9 of the worker at once, and a power cut after the
  next ``sync`` (about once a second).
- Opening the journal again gives exactly the rows that were added; a torn end is cut off.
- ``finish`` leaves one file with the rows in input order; calling it again gives the same.

- One process has it open at a time: a lock refuses a second one while the first lives.

Files beside each other: ``KEY.rows`` and ``KEY.bad`` hold output lines and reject lines as they
came and ``KEY.idx`` one entry per ``add`` with checksums of both; when the chunk is finished they
are ``KEY.jsonl``, ``KEY.errors.jsonl`` and ``KEY.fin``. ``KEY.now`` says what is being worked on
and carries the lock.
"""

from __future__ import annotations

import hashlib
import os
import struct
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from muster.base.atomic_files import replacing, sync_folder, write_all, write_pieces
from muster.base.errors import SetupError
from muster.pipeline.recovery import InProgress, Kind

#: first row, end row, output rows, rejects, dropped, bytes and checksum of lines and of rejects.
#: That of lines is the beginning of the sha256 of all lines so far, so that one pass over images
#: serves the entry and the chunk. It was the crc32 of its own lines, as that of rejects still is.
_ENTRY = struct.Struct("<IIIIIQIQI")
_CRC = struct.Struct("<I")
_SIZE = _ENTRY.size + _CRC.size
_NOW = struct.Struct("<IIIBBiI")
_OLD_NOW = 14  # bytes of it that version 0.1.0 wrote
_SYNC_EVERY_S = 1.0
_BLOCK = 1 << 20
#: A line for which a call to the system of its own costs little.
_LARGE = 1 << 13


class Entry(NamedTuple):
    """Rows ``start`` to ``stop`` of the shard gave these lines."""

    start: int
    stop: int
    num_rows: int
    num_rejects: int
    num_dropped: int
    size: int
    crc: int
    bad_size: int
    bad_crc: int


@dataclass(frozen=True)
class Totals:
    """What a finished chunk holds."""

    num_rows: int
    num_rejects: int
    num_dropped: int
    size: int
    sha256: str
    bad_size: int


class Journal:
    def __init__(self, folder: Path, key: str, session: int = 0) -> None:
        """Open or create; raises SetupError while another process has it open. ``session``: a
        number of the start of the run that this is part of.
        """
        self._session = session
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self.rows_path, self.bad_path = folder / f"{key}.jsonl", folder / f"{key}.errors.jsonl"
        self._rows_raw, self._bad_raw = folder / f"{key}.rows", folder / f"{key}.bad"
        self._raw_index, self._final_index = folder / f"{key}.idx", folder / f"{key}.fin"
        self._now_path = folder / f"{key}.now"
        self._now = _open(self._now_path)
        _lock(self._now, self._now_path)
        if self._final_index.exists():  # so the final files are whole; the others are stale
            for path in (self._rows_raw, self._bad_raw, self._raw_index):
                path.unlink(missing_ok=True)
            self._index = _open(self._final_index)
        else:
            self._index = _open(self._raw_index)
        self._rows = _open(_there(self._rows_raw, self.rows_path))
        bad = _there(self._bad_raw, self.bad_path)
        self._bad = _open(bad) if bad.exists() else -1  # made with the first reject
        self._entries: list[Entry] = []
        self._digest = hashlib.sha256()  # of all lines, as they came
        self._synced_s = time.monotonic()
        self._recover()

    # ------------------------------------------------------------------ while it grows

    def add(
        self,
        start: int,
        stop: int,
        lines: Sequence[bytes],
        num_rows: int,
        *,
        rejects: bytes = b"",
        num_rejects: int = 0,
        num_dropped: int = 0,
    ) -> None:
        """Append rows ``start`` to ``stop``, whose ``lines`` may be in pieces of any size. Raises
        OSError where the disk does not take them.
        """
        size = sum(map(len, lines))
        # To join images would copy them into memory that the kernel has to clear first.
        pieces = lines if size > _LARGE * len(lines) else [b"".join(lines)]
        for piece in pieces:
            self._digest.update(piece)
        write_pieces(self._rows, pieces)
        entry = Entry(
            start, stop, num_rows, num_rejects, num_dropped,
            size, _beginning(self._digest), len(rejects), zlib.crc32(rejects),
        )  # fmt: skip
        if rejects:
            if self._bad < 0:
                is_final = self._final_index.exists()  # of a finish that was cut short
                self._bad = _open(self.bad_path if is_final else self._bad_raw)
            write_all(self._bad, rejects)
        packed = _ENTRY.pack(*entry)
        write_all(self._index, packed + _CRC.pack(zlib.crc32(packed)))
        _append(self._entries, entry)
        if time.monotonic() - self._synced_s > _SYNC_EVERY_S:
            self.sync()

    def sync(self) -> None:
        for handle in (self._rows, self._index):
            os.fsync(handle)
        self._sync_rejects()
        self._synced_s = time.monotonic()

    def _sync_rejects(self) -> None:
        if any(entry.bad_size for entry in self._entries):  # of nothing nothing can be lost
            os.fsync(self._bad)

    def begin(self, note: InProgress) -> None:
        """Note which rows are worked on from now, so that a crash can be traced to them."""
        os.pwrite(self._now, _NOW.pack(*note, self._session), 0)

    def in_progress(self) -> InProgress | None:
        """The note of an earlier attempt about what it was doing when it ended. One about a broken
        context counts in its own session only: a GPU may have been repaired since.
        """
        data = os.pread(self._now, _NOW.size, 0)
        if len(data) < _OLD_NOW:
            return None
        *note, session = _NOW.unpack(data.ljust(_NOW.size, b"\xff"))
        start, stop, tries, kind, failures, doubted = note
        if Kind(kind).is_broken and session != self._session:
            return None
        return InProgress(start, stop, tries, Kind(kind), failures, doubted)

    # ------------------------------------------------------------------ what is in it

    def missing(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """The ranges of rows from ``start`` to ``stop`` that are not in it, in order."""
        at = start
        for entry in sorted(self._entries):
            if entry.start > at:
                yield at, min(entry.start, stop)
            at = max(at, entry.stop)
            if at >= stop:
                return
        if at < stop:
            yield at, stop

    def stored(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """The stored ranges from ``start`` to ``stop`` in which some row gave neither a record nor
        a reject, in order.
        """
        for entry in sorted(self._entries):
            if entry.num_dropped and entry.start < stop and entry.stop > start:
                yield max(entry.start, start), min(entry.stop, stop)

    @property
    def end(self) -> int:
        """The row after the last one that is stored; 0 if there is none."""
        return max((entry.stop for entry in self._entries), default=0)

    @property
    def num_done(self) -> int:
        return sum(entry.stop - entry.start for entry in self._entries)

    # ------------------------------------------------------------------ its end

    def finish(self) -> Totals:
        """Make the chunk's files: synced, in input order, under their final names.

        The indices are not synced: a chunk that the ledger has recorded never needs them again, and
        any other chunk is cut back to what its index shows.
        """
        ordered = sorted(self._entries)
        left: tuple[Path, ...] = ()
        if ordered == self._entries:
            sha256 = self._digest.hexdigest()
            _rename(self._rows_raw, self.rows_path)
            _rename(self._bad_raw, self.bad_path)
            _rename(self._raw_index, self._final_index)
            # Now, so that one commit of the file system has the names as well. A kill in between
            # leaves names of files that are not whole, which the next one cuts back as ever.
            os.fsync(self._rows)
            self._sync_rejects()
        else:
            self._write_ordered(ordered)
            sha256 = self._write_final_index(ordered)
            left = (self._rows_raw, self._bad_raw, self._raw_index)
        totals = _totals(ordered, sha256)
        if not totals.bad_size:
            self.bad_path.unlink(missing_ok=True)
        sync_folder(self._folder)
        for path in left:
            path.unlink(missing_ok=True)
        return totals

    def close(self) -> None:
        """Close all files; calling it again does nothing."""
        for handle in (self._index, self._rows, self._bad, self._now):
            if handle >= 0:
                os.close(handle)
        self._index = self._rows = self._bad = self._now = -1

    # ------------------------------------------------------------------ inside

    def _recover(self) -> None:
        """Read what is there and cut off what was not written whole."""
        good = rows_end = bad_end = 0
        rows_size = os.fstat(self._rows).st_size
        bad_size = 0 if self._bad < 0 else os.fstat(self._bad).st_size
        for entry in _entries(os.pread(self._index, os.fstat(self._index).st_size, 0)):
            if rows_end + entry.size > rows_size or bad_end + entry.bad_size > bad_size:
                break
            crc, digest = 0, self._digest.copy()
            for block in _blocks(self._rows, rows_end, entry.size):
                crc = zlib.crc32(block, crc)
                digest.update(block)
            is_whole = entry.crc in (_beginning(digest), crc)
            if not is_whole or _crc(self._bad, bad_end, entry.bad_size) != entry.bad_crc:
                break
            self._digest = digest
            rows_end, bad_end = rows_end + entry.size, bad_end + entry.bad_size
            good += _SIZE
            _append(self._entries, entry)
        for handle, end in ((self._index, good), (self._rows, rows_end), (self._bad, bad_end)):
            if handle >= 0:
                os.ftruncate(handle, end)
                os.lseek(handle, end, os.SEEK_SET)

    def _write_ordered(self, ordered: list[Entry]) -> None:
        """Copy the lines in the order of rows.

        The final index is written last: a kill before that finds the unordered files again.
        """
        offsets: dict[Entry, tuple[int, int]] = {}
        at = bad_at = 0
        for entry in self._entries:
            offsets[entry] = (at, bad_at)
            at, bad_at = at + entry.size, bad_at + entry.bad_size
        rows = [(offsets[entry][0], entry.size) for entry in ordered]
        bad = [(offsets[entry][1], entry.bad_size) for entry in ordered]
        _copy_pieces(self._rows, rows, self.rows_path)
        _copy_pieces(self._bad, bad, self.bad_path)

    def _write_final_index(self, ordered: list[Entry]) -> str:
        """Write an entry per gapless range, one for a whole chunk; returns its lines' sha256."""
        packed, digest = b"", hashlib.sha256()
        joined: list[Entry] = []
        for entry in ordered:
            _append(joined, entry)
        rows, bad = _open(self.rows_path), _open(self.bad_path)
        try:
            at = bad_at = 0
            for entry in joined:
                for block in _blocks(rows, at, entry.size):
                    digest.update(block)
                bad_crc = _crc(bad, bad_at, entry.bad_size)
                data = _ENTRY.pack(*entry._replace(crc=_beginning(digest), bad_crc=bad_crc))
                packed += data + _CRC.pack(zlib.crc32(data))
                at, bad_at = at + entry.size, bad_at + entry.bad_size
        finally:
            os.close(rows)
            os.close(bad)
        fresh = self._final_index.with_suffix(".fin.tmp")
        fresh.write_bytes(packed)
        os.replace(fresh, self._final_index)
        return digest.hexdigest()


class Kept(NamedTuple):
    """What an unfinished chunk has on disk: rows, and their rejects at the start of a file."""

    num_rows: int = 0
    bad_size: int = 0
    bad_path: Path | None = None


def begun_in(folder: Path) -> frozenset[str]:
    """The keys of the chunks that have files there, for one look at the folder: of a map's many
    chunks few are begun at a time, and a file server takes long to say of each that it is not.
    """
    with suppress(FileNotFoundError), os.scandir(folder) as files:
        return frozenset(file.name.partition(".")[0] for file in files)
    return frozenset()


def kept_of(folder: Path, key: str) -> Kept:
    """What the next worker finds done of a chunk, as its index has it. It takes no lock and changes
    nothing, so it may look while one writes; only after a power cut less of it may be whole.
    """
    # In this order: the final index is there before the other goes.
    for suffix in ("idx", "fin"):
        with suppress(FileNotFoundError):
            entries = list(_entries((folder / f"{key}.{suffix}").read_bytes()))
            num_rows = sum(entry.stop - entry.start for entry in entries)
            bad_path = _there(folder / f"{key}.bad", folder / f"{key}.errors.jsonl")
            return Kept(num_rows, sum(entry.bad_size for entry in entries), bad_path)
    return Kept()


def _entries(index: bytes) -> Iterator[Entry]:
    """The entries, up to the first that was not written whole."""
    for at in range(0, len(index), _SIZE):
        packed = index[at : at + _SIZE]
        if len(packed) < _SIZE or zlib.crc32(packed[:-4]) != _CRC.unpack(packed[-4:])[0]:
            return
        yield Entry._make(_ENTRY.unpack(packed[:-4]))


def _append(entries: list[Entry], entry: Entry) -> None:
    """Merge adjacent entries, so that a long chunk does not fill memory."""
    if entries and entries[-1].stop == entry.start:
        entries[-1] = _join(entries[-1], entry)
    else:
        entries.append(entry)


def _join(first: Entry, second: Entry) -> Entry:
    """One entry for two adjacent ones. Its checksums are 0, because none is read from memory."""
    return Entry(
        first.start, second.stop, first.num_rows + second.num_rows,
        first.num_rejects + second.num_rejects, first.num_dropped + second.num_dropped,
        first.size + second.size, 0, first.bad_size + second.bad_size, 0,
    )  # fmt: skip


def _totals(entries: list[Entry], sha256: str) -> Totals:
    names = ("num_rows", "num_rejects", "num_dropped", "size", "bad_size")
    sums = {name: sum(getattr(entry, name) for entry in entries) for name in names}
    return Totals(**sums, sha256=sha256)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT, 0o644)


def _there(raw: Path, final: Path) -> Path:
    """The growing file, or the final one if a kill interrupted ``finish`` after its rename."""
    return final if final.exists() and not raw.exists() else raw


def _rename(raw: Path, final: Path) -> None:
    """Give a file its final name, unless it has it already."""
    if raw.exists():
        os.replace(raw, final)


def _copy_pieces(handle: int, pieces: list[tuple[int, int]], path: Path) -> None:
    with replacing(path) as fresh:
        out = _open(fresh)
        try:
            for offset, size in pieces:
                for block in _blocks(handle, offset, size):
                    write_all(out, block)
        finally:
            os.close(out)


def _lock(handle: int, path: Path) -> None:
    import fcntl

    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise SetupError(
            f"Another process still works on {path.stem}.",
            hint="it is tried again when that process has ended.",
        ) from None


def _blocks(handle: int, offset: int, size: int) -> Iterator[bytes]:
    while size > 0:
        block = os.pread(handle, min(size, _BLOCK), offset)
        if not block:
            raise OSError(f"{size} bytes are missing at {offset}")
        yield block
        offset, size = offset + len(block), size - len(block)


def _crc(handle: int, offset: int, size: int) -> int:
    crc = 0
    for block in _blocks(handle, offset, size):
        crc = zlib.crc32(block, crc)
    return crc


def _beginning(digest: Any) -> int:
    return int.from_bytes(digest.digest()[:4], "little")
