"""From the user's words to data files: which, of what kind, and whether they have changed.

Compressed files, streams and iterables become plain files beside the run, written once.
"""

from __future__ import annotations

import codecs
import hashlib
import os
import re
import shutil
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from muster.base.atomic_files import replacing, sync_folder
from muster.base.errors import MissingPackageError, UsageError
from muster.pipeline.sources.places import inside, matching

_MOST = 10
#: Larger files are known by samples and their time, see `files.fingerprint`.
HASHED_WHOLE = 64 << 20


def identity(description: Mapping[str, Any]) -> dict[str, Any]:
    """A description without what may differ for the same input: times, and unpacked files."""
    files = [
        {key: value for key, value in file.items() if key not in ("mtime_ns", "unpacked")}
        for file in description["files"]
    ]
    return {**description, "files": files}


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """A sentence per difference, such as "data.jsonl: size 10 MB -> 12 MB"; none when equal."""
    lines = []
    if old["kind"] != new["kind"]:
        lines.append(f"input: {old['kind']} -> {new['kind']}")
    before = {file["path"]: file for file in old["files"]}
    after = {file["path"]: file for file in new["files"]}
    lines += [f"{_name(path)}: {_absence(path)}" for path in before if path not in after]
    lines += [f"{_name(path)}: is new" for path in after if path not in before]
    for path in before:
        if path in after:
            lines += _file_changes(path, before[path], after[path])
    if not lines and list(before) != list(after):
        lines.append("the files of the input have another order")
    if not lines and old["columns"] != new["columns"]:
        lines.append(f"columns: {', '.join(old['columns'])} -> {', '.join(new['columns'])}")
    lines += [
        f"{name}: {old.get(name, 'the default')} -> {new.get(name, 'the default')}"
        for name in ("delimiter", "encoding")
        if old.get(name) != new.get(name)
    ]
    for name, value in new["selection"].items():
        if old["selection"].get(name) != value:
            lines.append(f"{name}: {old['selection'].get(name)} -> {value}")
    more = len(lines) - _MOST
    return lines if more <= 0 else [*lines[:_MOST], f"and {more:,} more differences"]


def _absence(path: str) -> str:
    """Why it may not be among the files: those in folders of runs once were, for a pattern."""
    return "is there, but not in the input any more" if Path(path).exists() else "is gone"


def _file_changes(path: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    if old["size"] != new["size"]:
        before, after = _size(old["size"]), _size(new["size"])
        if before == after:
            before, after = f"{old['size']:,} bytes", f"{new['size']:,} bytes"
        return [f"{_name(path)}: size {before} -> {after}"]
    if old["hash"] != new["hash"]:
        return [f"{_name(path)}: other content of the same size{_unsure(new['size'])}"]
    return []


def _unsure(size: int) -> str:
    if size <= HASHED_WHOLE:
        return ""
    return ", or just another time: it is too large to be compared as a whole"


def _name(path: str) -> str:
    return Path(path).name


def _size(size: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}" if unit != "bytes" else f"{size:,.0f} bytes"
        size /= 1000
    return f"{size:,.3g} TB"


KINDS = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".csv": "csv", ".tsv": "tsv",
    ".parquet": "parquet",
}  # fmt: skip
PACKED = {".gz": "gzip", ".zst": "zstd"}
_KNOWN = ".jsonl, .ndjson, .json, .csv, .tsv, .parquet; text files also with .gz or .zst behind"
_SAMPLE = 64 << 10
_MAGIC = {
    b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"PAR1": "Parquet", b"PK\x03\x04": "zip",
    b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16",
}  # fmt: skip


@dataclass(frozen=True)
class Found:
    """``packed``: ``gzip``, ``zstd`` or nothing."""

    kind: str
    packed: str
    path: Path


def find_files(text: str, known: Collection[str] = ()) -> tuple[list[Found], str]:
    """The data files that a path, folder or glob names, in natural order; all of one kind. And in
    words what was left out of them: files of runs, unless their places are ``known``.
    """
    path, left_out = Path(text).expanduser(), ""
    if path.is_dir():
        files, left_out = inside(path, known)
        found = [item for item in map(_found, files) if item is not None]
        if not found:
            raise UsageError(
                f"The folder {text} holds no data files{_without(left_out)}.",
                hint=f"known: {_KNOWN}.",
            )
    elif path.exists():
        found = [_known(path)]
    elif any(sign in text for sign in "*?["):
        files, left_out = matching(path, known)
        found = [_known(name) for name in files]
        if not found:
            raise UsageError(
                f"No file matches {text}{_without(left_out)}.",
                hint="name a file or the folder of a run to read what it holds."
                if left_out
                else "quote the pattern for the shell.",
            )
    else:
        raise UsageError(
            f"There is no file or folder {text}.",
            hint="a data set of the Hugging Face hub is written hf:NAME.",
        )
    kinds = sorted({item.kind for item in found})
    if len(kinds) > 1:
        raise UsageError(
            f"{text} mixes kinds of files: {', '.join(kinds)}.",
            hint=f"name one kind with a pattern, such as '{path}/*.{kinds[0]}'.",
        )
    return sorted(found, key=lambda item: _natural(str(item.path))), left_out


def _without(left_out: str) -> str:
    return f", beside {left_out}" if left_out else ""


def check_start(path: Path, name: str, kind: str) -> None:
    """Raise UsageError where the first bytes contradict the suffix, before any work."""
    with path.open("rb") as stream:
        start = stream.read(4096)
    is_what = next((what for magic, what in _MAGIC.items() if start.startswith(magic)), "")
    if kind == "parquet":
        if is_what != "Parquet":
            raise UsageError(f"{name} is not a Parquet file: it does not begin with PAR1.")
        return
    if is_what == "UTF-16":
        raise UsageError(
            f"{name} is UTF-16.",
            hint="say --encoding utf-16.",
        )
    if is_what:
        raise UsageError(f"{name} is {is_what} data.", hint="give it the suffix that says so.")
    text = start.removeprefix(b"\xef\xbb\xbf").lstrip()
    if kind == "jsonl" and (text.startswith(b"[") or re.match(rb"\{\s*\n", text)):
        raise UsageError(
            f"{name} is one JSON value over several lines, not one object per line.",
            hint=f"convert it: jq -c '.[]' {name} > new.jsonl",
        )


def fingerprint(
    path: Path, *, always_timed: bool = False, time_ns: int | None = None
) -> dict[str, Any]:
    """Size, time and a hash: of all of a file up to 64 MiB, else of its first, middle and last
    64 KiB and of its time, because a change between them would show nowhere else. Of a Parquet file
    its footer, which tells where all columns are, stands for the time, unless ``always_timed``, as
    earlier versions had it. ``time_ns``: as if this were its time, for a copy on another host.
    """
    stat = path.stat()
    digest = hashlib.blake2b(str(stat.st_size).encode(), digest_size=16)
    with path.open("rb") as stream:
        if stat.st_size <= HASHED_WHOLE:
            while block := stream.read(1 << 20):
                digest.update(block)
            return {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "hash": digest.hexdigest()}
        footer = b"" if always_timed else _footer_of_parquet(stream, stat.st_size)
        digest.update(footer or str(stat.st_mtime_ns if time_ns is None else time_ns).encode())
        places = {0, max(0, (stat.st_size - _SAMPLE) // 2), max(0, stat.st_size - _SAMPLE)}
        for place in sorted(places):
            stream.seek(place)
            digest.update(stream.read(_SAMPLE))
    return {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "hash": digest.hexdigest()}


def _footer_of_parquet(stream: BinaryIO, size: int) -> bytes:
    """Nothing of other files."""
    is_parquet = stream.read(4) == b"PAR1"
    stream.seek(size - 8)
    end = stream.read(8)
    length = int.from_bytes(end[:4], "little")
    if not is_parquet or end[4:] != b"PAR1" or length > size - 12:
        return b""
    stream.seek(size - 8 - length)
    return stream.read(length)


def _found(path: Path) -> Found | None:
    packed = PACKED.get(path.suffix.lower(), "")
    inner = Path(path.stem).suffix if packed else path.suffix
    kind = KINDS.get(inner.lower())
    if kind is None or (packed and kind == "parquet"):
        return None
    return Found(kind, packed, path.absolute())


def _known(path: Path) -> Found:
    found = _found(path)
    if found is None:
        raise UsageError(f"Cannot tell what {path} is from its name.", hint=f"known: {_KNOWN}.")
    return found


def _natural(text: str) -> list[tuple[int, int, str]]:
    """A sort key by which ``part-10`` comes after ``part-9``."""
    parts = re.split(r"(\d+)", text)
    return [
        (0, int(part), part) if part.isdigit() and part.isascii() else (1, 0, part)
        for part in parts
    ]


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
            f"{what} is not a record but of type {type(record).__name__}.",
            hint="give dictionaries.",
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
