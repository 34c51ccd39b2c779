"""Compressed files, streams and iterables as plain files beside the run, written once."""

from __future__ import annotations

import codecs
import hashlib
import os
import shutil
import zlib
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from muster.base.atomic_files import replacing, sync_folder
from muster.base.errors import MissingPackageError, UsageError
from muster.pipeline.sources.files import Found, fingerprint

_BLOCK = 1 << 20
#: Packed bytes read at a time: few, because they may be a thousand times as many when unpacked.
_PACKED_BLOCK = 1 << 15


def unpack(found: Found, folder: Path) -> Path:
    """The text of a compressed file; the one of an earlier start when the file is unchanged."""
    key = hashlib.blake2b(f"{found.path}{fingerprint(found.path)}".encode(), digest_size=8)
    target = folder / f"{Path(found.path.stem).stem}-{key.hexdigest()}.{found.kind}"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    # A missing package is reported before a file is begun.
    copy = _copy_gzip if found.packed == "gzip" else _zstd_copier()
    with found.path.open("rb") as packed, replacing(target) as temporary:
        try:
            with temporary.open("wb") as plain:
                copy(packed, plain)
        except (EOFError, zlib.error, ValueError) as error:
            raise UsageError(
                f"Cannot unpack {found.path}: {error}.", hint="the file is damaged or cut short."
            ) from None
    return target


def text_encoding(name: str) -> str | None:
    """The encoding's own name; None for UTF-8, which needs no copy. UsageError if it is unknown."""
    try:
        found = codecs.lookup(name)
        "".encode(name)  # those that are no encodings of text refuse
    except LookupError:
        raise UsageError(
            f"There is no encoding {name!r}.", hint="try utf-8, utf-16, latin-1 or cp1252."
        ) from None
    return None if found.name in ("utf-8", "utf-8-sig", "ascii") else found.name


def recode(path: Path, name: str, folder: Path, encoding: str) -> Path:
    """A copy of a text file in UTF-8; that of an earlier start when the file is unchanged.

    UsageError names the first byte that the encoding does not have.
    """
    key = hashlib.blake2b(f"{name}{fingerprint(path)}{encoding}".encode(), digest_size=8)
    target = folder / f"{path.stem}-{key.hexdigest()}{path.suffix}"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    decoder = codecs.getincrementaldecoder(encoding)()
    line, before, is_first = 1, 0, True
    with path.open("rb") as raw, replacing(target) as temporary, temporary.open("wb") as plain:
        is_over = False
        while not is_over:
            block = raw.read(_BLOCK)
            is_over = not block
            try:
                text = decoder.decode(block, is_over)
            except UnicodeDecodeError as error:
                head = error.object[: error.start].decode(encoding, "replace")
                place = before + len(block) - len(error.object) + error.start
                bad = error.object[error.start]
                raise UsageError(
                    f"{name} is not {encoding}: byte {place + 1:,} is 0x{bad:02x}, in line "
                    f"{line + head.count(chr(10)):,}.",
                    hint="name its encoding with --encoding.",
                ) from None
            text = text.removeprefix("\ufeff") if is_first else text
            is_first = is_first and not text
            line += text.count("\n")
            before += len(block)
            plain.write(text.encode("utf-8", "replace"))
    return target


def spool(records: Iterable[Any], folder: Path, most: int | None) -> Path:
    """Write at most ``most`` records as JSON lines; the file is named by a hash of its content."""
    folder.mkdir(parents=True, exist_ok=True)
    working = folder / "records.jsonl"
    digest = hashlib.blake2b(digest_size=8)
    with replacing(working) as temporary, temporary.open("wb") as stream:
        for number, record in enumerate(islice(records, most)):
            line = json_line(record, f"record {number:,} of the input")
            digest.update(line)
            stream.write(line)
    target = folder / f"records-{digest.hexdigest()}.jsonl"
    os.replace(working, target)
    sync_folder(folder)
    return target


def spool_stream(
    open_at: Callable[[int], Iterable[Any]], target: Path, most: int | None, what: str
) -> Path:
    """As ``spool``, but goes on after an interruption: ``open_at(n)`` skips ``n`` records."""
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(".partial")
    done = _keep_whole_lines(partial)
    left = None if most is None else max(0, most - done)
    with partial.open("ab") as stream:
        for number, record in enumerate(islice(open_at(done), left), done):
            stream.write(json_line(record, f"record {number:,} of {what}"))
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(partial, target)
    sync_folder(target.parent)
    return target


def json_line(record: Any, what: str) -> bytes:
    """A record as a JSON line. Raises UsageError for no record, or no JSON (bytes, images)."""
    import orjson

    if not isinstance(record, Mapping):
        raise UsageError(
            f"{what} is no record: {type(record).__name__}.", hint="give dictionaries."
        )
    try:
        flags = orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY
        return orjson.dumps(dict(record), option=flags)
    except TypeError as error:
        raise UsageError(
            f"{what} cannot be kept as JSON: {error}.",
            hint=f"its fields: {', '.join(map(str, record))}. Drop or convert the one at fault.",
        ) from None


def _keep_whole_lines(path: Path) -> int:
    """Cut off a line that was not finished; returns the number of whole lines."""
    if not path.exists():
        return 0
    count = size = end = 0
    with path.open("r+b") as stream:
        while block := stream.read(_BLOCK):
            count += block.count(b"\n")
            last = block.rfind(b"\n")
            end = size + last + 1 if last >= 0 else end
            size += len(block)
        stream.truncate(end)
    return count


def _copy_gzip(packed: BinaryIO, plain: BinaryIO) -> None:
    import gzip

    try:
        with gzip.GzipFile(fileobj=packed) as stream:
            shutil.copyfileobj(stream, plain, _BLOCK)
    except gzip.BadGzipFile as error:
        raise ValueError(str(error)) from None


def _zstd_copier() -> Callable[[BinaryIO, BinaryIO], None]:
    try:
        import zstandard
    except ImportError:
        raise MissingPackageError("Reading .zst files", "zstandard", "zstd") from None

    def copy(packed: BinaryIO, plain: BinaryIO) -> None:
        # The library's own reader takes a file that is cut short for a whole one.
        frame = zstandard.ZstdDecompressor().decompressobj()
        is_open = False
        try:
            while block := packed.read(_PACKED_BLOCK):
                while block:
                    plain.write(frame.decompress(block))
                    is_open, block = not frame.eof, frame.unused_data
                    if frame.eof:
                        frame = zstandard.ZstdDecompressor().decompressobj()
        except zstandard.ZstdError as error:
            raise ValueError(str(error)) from None
        if is_open:
            raise ValueError("it ends in the middle of a frame")

    return copy
