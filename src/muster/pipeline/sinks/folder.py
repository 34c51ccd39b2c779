"""An output that is a folder: one file per shard and a manifest, seen whole or not at all."""

from __future__ import annotations

import ctypes
import errno
import glob
import hashlib
import os
import secrets
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from muster.base.atomic_files import sync_folder
from muster.base.codec import to_json
from muster.base.errors import UsageError
from muster.pipeline.sinks.encode import Encoder
from muster.pipeline.sinks.model import Format, Part

MANIFEST = "manifest.json"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def write_parts(
    shards: Sequence[Sequence[Part]], encoder: Encoder, place: Path, format: Format
) -> int:
    """``part-00000.jsonl`` … and the manifest in ``place``, synced; the bytes of the parts."""
    files: list[dict[str, Any]] = []
    for number, shard in enumerate(shards):
        path = place / f"part-{number:05d}.{format}"
        with path.open("w+b") as file:
            encoder.write(shard, file)
            file.flush()
            os.fsync(file.fileno())
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        files.append(
            {
                "file": path.name,
                "rows": sum(part.num_rows for part in shard),
                "bytes": path.stat().st_size,
                "sha256": sha256,
            }
        )
    manifest = place / MANIFEST
    with manifest.open("wb") as file:
        file.write(to_json({"format": format, "files": files}))
        file.flush()
        os.fsync(file.fileno())
    return sum(entry["bytes"] for entry in files)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary folder beside ``path``, and put it in the place of ``path`` on success.

    UsageError when ``path`` holds files that are not of an earlier output: they would be lost.
    """
    _check_only_ours(path)
    for left in path.parent.glob(f".{glob.escape(path.name)}.????????*.folder"):
        shutil.rmtree(left, ignore_errors=True)
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
    """Swap two folders; in one step where the system can, else with a moment without ``old``."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        names = os.fsencode(new), os.fsencode(old)
        if hasattr(libc, "renameat2"):
            if libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
                return
            if ctypes.get_errno() not in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number), str(old))
    aside = new.with_name(new.name.replace(".folder", "-old.folder"))
    os.rename(old, aside)
    os.rename(new, old)
    os.rename(aside, new)
