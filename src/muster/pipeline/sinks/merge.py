"""From finished parts to the output: a stream, checked on the way, visible only when whole."""

from __future__ import annotations

import errno
import glob
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from muster.base.atomic_files import explain_os_error, replacing
from muster.base.errors import SetupError
from muster.pipeline.sinks import folder
from muster.pipeline.sinks.encode import encoder_for
from muster.pipeline.sinks.model import Part, SinkSpec
from muster.pipeline.sinks.parts import by_shard, error_blocks
from muster.pipeline.sinks.spec import prepare_place


@dataclass(frozen=True, kw_only=True)
class Merged:
    """``num_bytes`` of the data files; ``notes`` for the summary, such as columns of JSON text."""

    num_rows: int
    num_errors: int
    num_bytes: int
    notes: tuple[str, ...] = ()


def merge(parts: Sequence[Part], spec: SinkSpec, *, errors: Path) -> Merged:
    """Write the output of ``parts``, sorted by (order, start), and their errors to ``errors``.

    Memory does not depend on how much there is. The output is the old one or the new one at any
    moment; ``errors`` is renamed just before it, and removed when nothing was rejected.
    SetupError: a part is missing, doubled or damaged, or the disk is full. UsageError: a value
    does not fit its declared column.
    """
    shards = by_shard(parts)
    prepare_place(spec)
    with explained(spec.path):
        encoder = encoder_for(spec, parts)
        if spec.is_folder:
            with folder.replacing(spec.path) as temporary:
                num_bytes = folder.write_parts(shards, encoder, temporary, spec.format)
                merge_errors(parts, errors)
        else:
            sweep(spec.path)
            with replacing(spec.path) as temporary:
                with temporary.open("wb") as file:
                    encoder.write(parts, file)
                num_bytes = temporary.stat().st_size
                merge_errors(parts, errors)
    return Merged(
        num_rows=sum(part.num_rows for part in parts),
        num_errors=sum(part.num_errors for part in parts),
        num_bytes=num_bytes,
        notes=encoder.notes,
    )


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


def sweep(path: Path) -> None:
    """Remove what a killed `replacing` of ``path`` has left: it may be as large as the output."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.????????.tmp"):
        left.unlink(missing_ok=True)


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """OSErrors as SetupErrors that speak of the output."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise explain_os_error(error, "write", path) from error
        raise SetupError(
            f"Cannot write {path}: {error.strerror}.",
            hint="free space there and run the same command again; nothing finished is lost, "
            "and no half output was left behind.",
        ) from error
