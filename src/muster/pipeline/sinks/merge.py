"""From finished parts to the output: a stream, checked on the way, visible only when whole."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import itertools
import json
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from muster.base.atomic_files import (
    DISK_REFUSALS,
    disk_error,
    explain_os_error,
    replacing,
    sweep,
    sync_folder,
)
from muster.base.codec import write_json
from muster.base.errors import SetupError, UsageError
from muster.pipeline.apart import apart
from muster.pipeline.sinks.formats import (
    MANIFEST,
    Encoder,
    Format,
    SinkSpec,
    encoder_for,
    prepare_place,
)
from muster.pipeline.sinks.parts import Part, batches, by_shard, error_blocks
from muster.pipeline.sources.columnar import Again
from muster.pipeline.sources.source import DataFile

if TYPE_CHECKING:
    from muster.pipeline.sinks.parts_ahead import Ahead

#: Hashes of ids that are read at once.
_HASHES = 1 << 20
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2

#: The bytes of an output, and notes for the summary.
Written = tuple[int, tuple[str, ...]]


def part_name(number: int, format: Format) -> str:
    return f"part-{number:05d}.{format}"


def write_parts(
    shards: Sequence[Sequence[Part]], encoder: Encoder, place: Path, format: Format
) -> int:
    """Write ``part-00000.jsonl`` … and the manifest to ``place``, synced; returns their bytes."""
    files: list[dict[str, Any]] = []
    for number, shard in enumerate(shards):
        path = place / part_name(number, format)
        with path.open("w+b") as file:
            encoder.write(shard, file)
            file.flush()
            os.fsync(file.fileno())
            file.seek(0)
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        files.append(
            {
                "file": path.name,
                "rows": sum(part.num_rows for part in shard),
                "bytes": path.stat().st_size,
                "sha256": sha256,
            }
        )
    write_json(place / MANIFEST, {"format": format, "files": files})
    return sum(entry["bytes"] for entry in files)


@contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder beside ``path``, and put it in the place of ``path`` on success.

    UsageError when ``path`` holds files that are not of an earlier output: they would be lost.
    """
    _check_only_ours(path)
    sweep(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.folder")
    temporary.mkdir()
    try:
        yield temporary
        sync_folder(temporary)
        if path.exists():
            _exchange(temporary, path)
        else:
            os.rename(temporary, path)
        sync_folder(path.parent)
    finally:
        # What is here now is a failed attempt or the output that was replaced.
        shutil.rmtree(temporary, ignore_errors=True)


def _check_only_ours(path: Path) -> None:
    if not path.exists():
        return
    others = sorted(
        entry.name
        for entry in path.iterdir()
        if entry.name != MANIFEST and not (entry.name.startswith("part-") and entry.is_file())
    )
    if others:
        raise UsageError(
            f"Cannot replace the folder {path}: it holds other files ({', '.join(others[:5])}).",
            hint="choose another --output, or move them away.",
        )


def _exchange(new: Path, old: Path) -> None:
    """Swap two folders: in one step where the system can, else ``old`` is missing for a moment."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        names = os.fsencode(new), os.fsencode(old)
        if hasattr(libc, "renameat2"):
            if libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
                return
            if ctypes.get_errno() not in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number), str(old))
    aside = new.with_name(f"{new.name.removesuffix('.folder')}-old.folder")
    os.rename(old, aside)
    os.rename(new, old)
    os.rename(aside, new)


@dataclass(frozen=True, kw_only=True)
class Merged:
    """``num_bytes`` of the data files; ``notes`` for the summary, such as columns of JSON text."""

    num_rows: int
    num_errors: int
    num_bytes: int
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, parts: Sequence[Part], num_bytes: int, notes: tuple[str, ...] = ()) -> Self:
        return cls(
            num_rows=sum(part.num_rows for part in parts),
            num_errors=sum(part.num_errors for part in parts),
            num_bytes=num_bytes,
            notes=notes,
        )


def merge(
    parts: Sequence[Part], spec: SinkSpec, *, errors: Path, ahead: Ahead | None = None
) -> Merged:
    """Write the output of ``parts``, sorted by (order, start), and their errors to ``errors``.

    Memory does not depend on how much there is. The output is the old one or the new one at any
    moment; ``errors`` is renamed just before it, and removed when nothing was rejected. ``ahead``
    may have copied the first parts.
    SetupError: a part is missing, doubled or damaged, or the disk is full. UsageError: a value
    does not fit its declared column.
    """
    by_shard(parts)
    prepare_place(spec)
    with explained(spec.path):
        if spec.is_folder:
            with replacing_folder(spec.path) as temporary:
                num_bytes, notes = _written(parts, spec, temporary)
                merge_errors(parts, errors)
        else:
            if ahead is None or not ahead.has_begun:
                sweep(spec.path)
            with replacing(spec.path) as temporary:
                done = None if ahead is None else ahead.hand_over(temporary, parts, spec)
                num_bytes, notes = done or _written(parts, spec, temporary)
                _check_whole(parts, spec, num_bytes)
                merge_errors(parts, errors)
    return Merged.of(parts, num_bytes, notes)


def _check_whole(parts: Sequence[Part], spec: SinkSpec, num_bytes: int) -> None:
    """SetupError where another map that writes the same output has swept what was written."""
    expected = sum(part.num_bytes for part in parts)
    if spec.format == "jsonl" and num_bytes != expected:
        raise SetupError(
            f"Cannot write {spec.path}: {num_bytes:,} bytes were written where {expected:,} belong "
            "there.",
            hint="does another map write the same output? Run the same command again when it has "
            "ended; nothing finished is lost.",
        )


def _written(parts: Sequence[Part], spec: SinkSpec, place: Path) -> Written:
    if spec.format == "parquet":
        return apart(write_the_output, parts, spec, place)
    return write_the_output(parts, spec, place)


def write_the_output(parts: Sequence[Part], spec: SinkSpec, place: Path) -> Written:
    """Write the parts to the file or into the folder ``place``, behind what is in the file."""
    encoder = encoder_for(spec, parts)
    if spec.is_folder:
        return write_parts(by_shard(parts), encoder, place, spec.format), encoder.notes
    with place.open("ab") as file:
        encoder.write(parts, file)
    return place.stat().st_size, encoder.notes


def find_repeated_ids(parts: Sequence[Part], inputs: Sequence[DataFile] = ()) -> str | None:
    """A sentence when several records of the output have one id; None when no two have.

    Memory does not depend on how many there are: eight bytes of each id go through a file, and as
    many of them are compared at a time as fit into some megabytes.
    """
    import numpy as np

    num_ids = num_repeats = example = 0
    with tempfile.TemporaryFile() as file:
        for text in _ids(parts, Again(inputs)):
            if text:
                file.write(_hash(text))
                num_ids += 1
        num_passes = num_ids // (4 * _HASHES) + 1
        for number in range(num_passes):
            file.seek(0)
            chosen = [np.zeros(0, np.uint64)]
            while data := file.read(8 * _HASHES):
                block = np.frombuffer(data, np.uint64)
                chosen.append(block[block % np.uint64(num_passes) == number])
            found, counts = np.unique(np.concatenate(chosen), return_counts=True)
            num_repeats += int(counts.sum()) - len(found)
            if not example and counts.max(initial=0) > 1:
                example = int(found[counts.argmax()])
    if not num_repeats:
        return None
    wanted = example.to_bytes(8, sys.byteorder)
    ids = _ids(parts, Again(inputs))
    same = ((n, text) for n, text in enumerate(ids, 1) if text and _hash(text) == wanted)
    (first, text), (second, _) = itertools.islice(same, 2)
    have = "record has" if num_repeats == 1 else "records have"
    return (
        f"{num_repeats:,} {have} the id of an earlier record; all are kept ({text} is the id of "
        f"records {first:,} and {second:,} of the output)"
    )


def _ids(parts: Iterable[Part], again: Again) -> Iterator[str]:
    """The id of every record as JSON; empty where a record has none."""
    for batch in batches(parts, again):
        if batch.carried is not None and batch.carried.has("id"):
            from muster.pipeline.arrow import values_of

            ids = values_of(batch.carried.batch.column("id"))
        else:
            ids = [record.get("id") for record in batch.records]
        for value in ids:
            yield "" if value is None else json.dumps(value, default=str)


def _hash(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


def merge_errors(parts: Iterable[Part], path: Path) -> None:
    """Replace ``path`` by the rejected records of all parts; no file when there are none."""
    with_errors = [part for part in parts if part.num_errors]
    if not with_errors:
        path.unlink(missing_ok=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    sweep(path)
    with replacing(path) as temporary, temporary.open("wb") as file:
        for part in with_errors:
            for block in error_blocks(part):
                file.write(block)


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Raise OSErrors inside as SetupErrors that name the output."""
    try:
        yield
    except OSError as error:
        found = disk_error(error)
        if found is None or error.errno == errno.EROFS:
            raise explain_os_error(error, "write", path, other="choose another --output") from error
        is_limit, reason = found.errno == errno.EFBIG, DISK_REFUSALS[found.errno or 0].reason
        remedy = "raise the limit (ulimit -f)" if is_limit else "free space there"
        raise SetupError(
            f"Cannot write {path}: {error.strerror}.",
            hint=f"{reason}{remedy} and run the same command again; nothing finished is lost, "
            "and no half output was left behind.",
        ) from error
