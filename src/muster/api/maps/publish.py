"""From finished chunks to the output: which chunks there are, the merge, and its record."""

from __future__ import annotations

import dataclasses
import functools
import glob
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from muster.api.maps.job import MapJob
from muster.base.codec import read_record, write_json
from muster.base.errors import MusterError, SetupError, UsageError
from muster.farm.ledger.read import LedgerReader
from muster.farm.task import TaskState
from muster.pipeline.apart import apart
from muster.pipeline.journal import Kept, begun_in, kept_of
from muster.pipeline.sinks.formats import MANIFEST, SinkSpec
from muster.pipeline.sinks.merge import find_repeated_ids, merge, part_name
from muster.pipeline.sinks.parts import Part
from muster.pipeline.sinks.parts_ahead import Ahead
from muster.pipeline.sinks.unordered import Appender
from muster.pipeline.sources.files import find_files
from muster.pipeline.sources.places import is_named
from muster.pipeline.sources.source import Source
from muster.run.folder import RunFolder


@dataclass(frozen=True, kw_only=True)
class Published:
    """``published.json``: what the output was when it was written."""

    output: str
    size: int
    mtime_ns: int
    rows: int
    rejected: int
    dropped: int
    rows_in: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Tally:
    """Sums over the chunks in the ledger. ``num_begun``: how many of the rows of ``num_open`` are
    done all the same, in chunks that are not finished. ``begun``: what is there of these, and of
    chunks that have failed.
    """

    num_in: int = 0
    num_out: int = 0
    num_rejected: int = 0
    num_dropped: int = 0
    num_blank: int = 0
    num_lost: int = 0
    num_open: int = 0
    num_begun: int = 0
    begun: tuple[Kept, ...] = ()


def tally(folder: RunFolder) -> Tally:
    """What the ledger says so far; zeros where there is none yet."""
    if not folder.ledger.exists():
        return Tally()
    sums: Counter[str] = Counter()
    begun: list[Kept] = []
    listed = functools.cache(begun_in)  # each folder once
    for state, key, params, value in _chunks(folder):
        if state is TaskState.DONE:
            blank = value.get("blank", 0)
            sums.update(
                num_in=value["rows_in"] - blank, num_blank=blank, num_out=value["rows_out"],
                num_rejected=value["rejected"], num_dropped=value["dropped"],
            )  # fmt: skip
        else:
            name = "num_lost" if state is TaskState.FAILED else "num_open"
            sums[name] += params["stop"] - params["start"]
            place = folder.parts_of(params["order"])
            if key in listed(place):
                begun.append(kept_of(place, key))
                if name == "num_open":
                    sums["num_begun"] += begun[-1].num_rows
    return Tally(**sums, begun=tuple(begun))


def parts_of(folder: RunFolder) -> list[Part]:
    """The finished chunks in output order."""
    parts = []
    with LedgerReader(folder.ledger) as ledger:
        for task in ledger.tasks():
            if task.state is not TaskState.DONE:
                continue
            value = json.loads(task.value or b"{}")
            base = folder.parts_of(value["order"]) / task.key.hex()
            errors = base.with_suffix(".errors.jsonl") if value["rejected"] else None
            parts.append(
                Part(
                    value["order"], value["start"], value["stop"], base.with_suffix(".jsonl"),
                    value["rows_out"], value["bytes"], value["sha256"], errors, value["rejected"],
                )
            )  # fmt: skip
    return sorted(parts, key=lambda part: (part.order, part.start))


def finished_lines(folder: RunFolder) -> Iterator[bytes]:
    """The records of finished chunks as lines of JSON, in the order of the source."""
    for part in parts_of(folder):
        with suppress(FileNotFoundError), part.rows.open("rb") as file:  # or it is in the output
            yield from file


def _chunks(
    folder: RunFolder,
) -> Iterator[tuple[TaskState, str, dict[str, Any], dict[str, Any]]]:
    """State, key, parameters and result of every chunk."""
    with LedgerReader(folder.ledger) as ledger:
        for task in ledger.tasks():
            value = json.loads(task.value) if task.value else {}
            yield task.state, task.key.hex(), json.loads(task.payload), value


def check_balance(
    folder: RunFolder, shards: Sequence[int], published: Published | None = None
) -> None:
    """SetupError unless the finished chunks account for every row of every shard, once."""
    chunks = [
        ChunkCounts(
            value["order"], value["start"], value["stop"], value["rows_in"], value["rows_out"],
            value["dropped"], value["rejected"], value.get("blank", 0),
        )
        for state, _, _, value in _chunks(folder)
        if state is TaskState.DONE
    ]  # fmt: skip
    why = imbalance_of_rows(shards, chunks)
    if why is not None:
        state = f"Nothing was published; every part is kept in {folder.parts}."
        if published is not None:
            state = f"The output {published.output} of an earlier start is not whole."
        raise SetupError(
            f"The counts do not balance: {why}. {state}",
            hint="the ledger has lost a part of the plan or of the results. Begin again in another "
            "--run-dir (or with --restart, which puts this run aside), and please report it.",
        )


def publish(
    folder: RunFolder,
    job: MapJob,
    source: Source,
    counts: Tally,
    appender: Appender | None = None,
    ahead: Ahead | None = None,
) -> Published:
    """Write the output, note what it is, and only then remove the chunks' files."""
    sink, parts = sink_of(folder, job, source), parts_of(folder)
    # A kill must never leave an output that this run does not know as its own: the permission is
    # written before the rename and removed after the record is written, and the chunks go last.
    allow_output(folder, sink)
    if appender is None:
        merged = merge(parts, sink, errors=folder.errors_jsonl, ahead=ahead)
    else:
        for part in parts:
            appender.add(part)
        merged = appender.finish(parts, errors=folder.errors_jsonl)
        parts = appender.in_order(parts)
    repeated = None
    if _may_repeat_ids(folder, job, source):
        try:
            repeated = apart(find_repeated_ids, parts, sink.inputs)
        except (MusterError, OSError) as error:  # the output is there, and whole
            repeated = f"whether ids repeat is not known: {error}"
    stat = sink.path.stat()
    published = Published(
        output=str(sink.path.absolute()),
        size=merged.num_bytes,
        mtime_ns=stat.st_mtime_ns,
        rows=merged.num_rows,
        rejected=merged.num_errors,
        dropped=counts.num_dropped,
        rows_in=counts.num_in,
        notes=(*merged.notes, *([repeated] if repeated else [])),
    )
    write_json(folder.published_json, published)
    folder.publishing_json.unlink()
    if not job.settings.keep_parts:
        shutil.rmtree(folder.parts, ignore_errors=True)
    return published


def _may_repeat_ids(folder: RunFolder, job: MapJob, source: Source) -> bool:
    """Whether records have ids from the input or from a stage, which may be the same; those that
    we give never repeat.
    """
    if not job.settings.keeps_ids:
        return False
    done = [value for state, _, _, value in _chunks(folder) if state is TaskState.DONE]
    are_given = "id" in source.describe()["columns"] or any(v.get("own_ids") for v in done)
    return are_given and not are_apart([value.get("ids") for value in done])


def are_apart(ends: Sequence[list[Any] | None]) -> bool:
    """Whether no two chunks can have one id, by what each says of its `RisingIds`."""
    if None in ends:
        return False
    try:
        return all(last < first for (_, last), (first, _) in pairwise(sorted(filter(None, ends))))
    except TypeError:  # one has texts where another has numbers
        return False


def allow_output(folder: RunFolder, sink: SinkSpec) -> None:
    """Note that this run may write or replace the output, which `check_output` reads."""
    write_json(folder.publishing_json, {"output": str(sink.path.absolute())})


def sink_of(folder: RunFolder, job: MapJob, source: Source) -> SinkSpec:
    """The output of a run whose stages have been set up."""
    sink = with_columns(folder, job.output)
    if sink.format != "parquet":
        return sink
    # It has a schema, which keeps what the input's carries.
    metadata = tuple(source.metadata().items())
    return dataclasses.replace(sink, metadata=metadata, inputs=tuple(source.files))


def with_columns(folder: RunFolder, sink: SinkSpec) -> SinkSpec:
    """The sink with the column types that the stages have declared when they were set up."""
    if not folder.map_columns.exists():
        return sink
    declared = read_record(folder.map_columns, "columns.json", {})
    return dataclasses.replace(sink, columns=tuple(declared.items()))


def read_published(folder: RunFolder) -> Published | None:
    if not folder.published_json.exists():
        return None
    shape = {"output": str, "size": int, "notes": list}
    record = read_record(folder.published_json, "published.json", shape)
    record["notes"] = tuple(map(str, record["notes"]))
    try:
        return Published(**record)
    except TypeError as error:
        raise SetupError(
            f"The published.json at {folder.published_json} is damaged: {error}.",
            hint="restore it from a copy.",
        ) from None


def size_of(path: Path) -> int:
    """Bytes of a file, or of the data files in a folder of parts."""
    if path.is_dir():
        return sum(entry.stat().st_size for entry in path.glob("part-*"))
    return path.stat().st_size


def check_output(folder: RunFolder, sink: SinkSpec, *, overwrite: bool) -> bool:
    """Whether only ``overwrite`` allows this run to replace the output.

    Raises UsageError without it, where the output exists and is not what this run folder has
    written, now or before ``--restart`` put that run aside.
    """
    path = sink.path
    is_there = path.exists() and (not path.is_dir() or any(path.iterdir()))
    if not is_there or _is_half_published(folder, path):
        return False
    size = size_of(path)
    published = read_published(folder)
    if published is not None and published.size == size:
        return False
    earlier = [found for found in map(read_published, _put_aside(folder)) if found is not None]
    if any(found.size == size and found.output == str(path.absolute()) for found in earlier):
        return False
    if overwrite:
        return True
    if published is None:
        raise UsageError(
            f"The output {path} exists and was not made by this run ({folder.path}).",
            hint="choose another --output, move it away, or replace it with --overwrite.",
        )
    raise UsageError(
        f"The output {path} has changed since this run wrote it: {published.size:,} bytes "
        f"then, {size:,} now.",
        hint="move it away, or replace it with --overwrite."
        if folder.parts.exists()
        else "its chunks are gone; make it again from the start with --restart --overwrite.",
    )


def claim_output(folder: RunFolder, sink: SinkSpec, *, overwrite: bool) -> None:
    """Check the output, and note what ``--overwrite`` allows for every later start."""
    if check_output(folder, sink, overwrite=overwrite):
        folder.create()
        allow_output(folder, sink)


def _put_aside(folder: RunFolder) -> Iterator[RunFolder]:
    place = Path(os.path.realpath(folder.path))
    yield from map(RunFolder, place.parent.glob(f"{glob.escape(place.name)}.before-*"))


def check_not_input(job: MapJob) -> None:
    """UsageError when the output is a file of the input, by whatever name, or holds one."""
    if not isinstance(job.input, str):
        return
    text = job.input.removeprefix("hf:")
    if text == job.input:
        files = [found.path for found in find_files(text)[0]]
    else:
        files = [Path(text).expanduser()]
    output = job.output.path
    for file in files:
        holders = [file, *file.resolve().parents] if output.is_dir() else [file]
        if any(_is_same_file(output, holder) for holder in holders):
            what = "is the input" if _is_same_file(output, file) else "holds the input"
            raise UsageError(
                f"The output {output} {what} {file}: it would be replaced by what is made of it.",
                hint="choose another --output; --overwrite never replaces an input.",
            )


def check_not_among_input(job: MapJob) -> None:
    """UsageError when a later start would find the output where it looks for the input."""
    if not isinstance(job.input, str) or job.input.startswith("hf:"):
        return
    output = job.output.path
    written = [output / part_name(0, job.output.format), output / MANIFEST]
    if any(is_named(file, job.input) for file in (written if job.output.is_folder else [output])):
        raise UsageError(
            f"The output {job.output.path} would lie in the input {job.input}, and the next start "
            "would read it as well.",
            hint="write it elsewhere, or name the files of the input with a pattern that leaves it "
            "out.",
        )


def _is_same_file(one: Path, two: Path) -> bool:
    try:
        return one.samefile(two)
    except OSError:  # one of them is not there
        return False


def _is_half_published(folder: RunFolder, path: Path) -> bool:
    """Whether this run was killed while it wrote that output: it may be there or not yet."""
    if not folder.publishing_json.exists():
        return False
    if path.absolute().is_relative_to(folder.path.absolute()):
        return True  # of a stage, in a folder that may have been moved since
    record = read_record(folder.publishing_json, "publishing.json", {"output": str})
    return bool(record["output"] == str(path.absolute()))


# ---------------------------------------------------------------------- whether it adds up


class ChunkCounts(NamedTuple):
    """What a finished chunk says of rows ``start`` to ``stop`` of its shard."""

    order: int
    start: int
    stop: int
    rows_in: int
    rows_out: int
    dropped: int
    rejected: int
    blank: int = 0


def imbalance_of_rows(shards: Sequence[int], chunks: Sequence[ChunkCounts]) -> str | None:
    """What is wrong with the rows of a map, as `imbalance_of_tasks` says it of a sweep's tasks.

    ``shards`` holds the number of rows of each shard, ``chunks`` all chunks that are finished.
    """
    sums = [sum(column) for column in zip(*(chunk[3:] for chunk in chunks), strict=True)]
    rows_in, rows_out, dropped, rejected, blank = sums or (0, 0, 0, 0, 0)
    why = _misfit(shards, sorted(chunks))
    if why is None and rows_in == sum(shards):
        return None
    return (
        f"the source has {sum(shards):,} rows, and the finished chunks account for {rows_in:,} "
        f"({rows_out:,} records out, {dropped:,} rows dropped, {rejected:,} rejected"
        + (f", {blank:,} blank lines)" if blank else ")")
        + ("" if why is None else f": {why}")
    )


def _misfit(shards: Sequence[int], chunks: Sequence[ChunkCounts]) -> str | None:
    """The first hole, overlap or chunk that does not add up."""
    at = [0] * len(shards)
    for chunk in chunks:
        name = f"rows {chunk.start:,} to {chunk.stop:,} of shard {chunk.order:,}"
        if not 0 <= chunk.order < len(shards):
            return f"there is no shard {chunk.order:,}"
        if chunk.start > at[chunk.order]:
            missing = f"rows {at[chunk.order]:,} to {chunk.start:,} of shard {chunk.order:,}"
            return f"{missing} are missing"
        if chunk.start < at[chunk.order]:
            return f"{name} are there twice"
        at[chunk.order] = chunk.stop
        accounted = chunk.rows_out + chunk.dropped + chunk.rejected + chunk.blank
        is_whole = chunk.rows_in == chunk.stop - chunk.start
        if not is_whole or chunk.rows_in > accounted or chunk.dropped > chunk.rows_in:
            return (
                f"{name} are {chunk.rows_in:,} in, {chunk.rows_out:,} out, {chunk.dropped:,} "
                f"dropped and {chunk.rejected:,} rejected"
            )
    for order, (end, count) in enumerate(zip(at, shards, strict=True)):
        if end != count:
            return f"shard {order:,} ends at row {end:,} of {count:,}"
    return None
