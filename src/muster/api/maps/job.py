"""What a map does, as values: the job and its result; and its workers, which begin first: they
import while the input is read. What may not change between two starts is in `plan`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muster.api.start.options import MapSettings, SweepOptions
from muster.api.start.placing import slots_of, would_take
from muster.base.errors import EXIT_OK, EXIT_SOME_FAILED, MusterError, UsageError
from muster.base.settings import read_settings
from muster.base.signals import stop_code
from muster.farm.executors.cluster import CLUSTERS
from muster.farm.executors.head_start import HeadStart
from muster.pipeline.sources.files import find_files
from muster.pipeline.sources.source import (
    DEFAULT_SHARDS,
    LEAST_ROWS,
    SHARDS_PER_WORKER,
    Selection,
    Source,
)
from muster.pipeline.sources.table import InputOptions, open_input
from muster.run.folder import RunFolder, folder_for
from muster.run.record import drawn_id, read_run

if TYPE_CHECKING:
    from muster.pipeline.sinks.formats import SinkSpec
    from muster.pipeline.stages import StageSpec


@dataclass(frozen=True, kw_only=True)
class MapJob:
    """``input``: a path, folder, glob or ``hf:NAME``, or records from Python. ``check_columns``
    raises UsageError when a column that the stages need is not there; ``rehearse``: see
    `Workload`.
    """

    name: str
    stages: tuple[StageSpec, ...]
    input: str | Iterable[Mapping[str, Any]]
    output: SinkSpec
    selection: Selection = field(default_factory=Selection)
    options: InputOptions = field(default_factory=InputOptions)
    settings: MapSettings = field(default_factory=MapSettings)
    check_columns: Callable[[Iterable[str]], None] = lambda columns: None
    rehearse: Callable[[RunFolder], bool] | None = None

    def __post_init__(self) -> None:
        """Raise UsageError where there is nothing to do with a record."""
        if not self.stages:
            raise UsageError(
                f"{self.name} has no stage: the list is empty.",
                hint="put a function or a class with process into the list.",
            )


@dataclass(frozen=True, kw_only=True)
class Mapped:
    """What came of a map. ``output`` is None while it is not written.

    ``num_in`` = rows that are done; of these ``num_rejected`` are in ``errors`` and
    ``num_dropped`` were dropped by a stage or by ``where``. ``num_blank``: blank lines, which are
    no rows.
    ``num_lost``: rows of chunks that failed as a whole, and ``causes`` why. ``num_begun``: rows
    that are done in chunks which are not finished; they are not done again.
    """

    path: Path
    output: Path | None
    errors: Path | None
    num_total: int
    num_in: int
    num_out: int
    num_rejected: int
    num_dropped: int
    num_blank: int = 0
    num_lost: int = 0
    num_begun: int = 0
    is_interrupted: bool = False
    stop_signal: int = 0
    was_done: bool = False
    seconds: float = 0.0
    numbers: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    causes: tuple[str, ...] = ()
    cost: str | None = None

    @property
    def exit_code(self) -> int:
        if self.is_interrupted:
            return stop_code(self.stop_signal)
        is_good = self.output is not None and not self.num_rejected and not self.num_lost
        return EXIT_OK if is_good else EXIT_SOME_FAILED


#: What workers import meanwhile: the module of what a task of a map calls.
CHUNKS = "muster.pipeline.chunk"


def open_source(job: MapJob, options: SweepOptions, folder: Path, home: RunFolder | None) -> Source:
    """``home``: the folder of the run, which may have been begun; None for a run from the start."""
    fixed = read_run(home).fixed if home is not None and home.exists() else None
    source = open_input(job.input, job.selection, job.options, folder, _known_files(fixed or {}))
    job.check_columns(source.describe()["columns"])
    # A run that goes on has its chunks; if it does not say how many, as many as there ever are.
    num = _num_chunks(job, options) if fixed is None else fixed.get("chunks", DEFAULT_SHARDS)
    return replace(source, num_shards=num)


def _num_chunks(job: MapJob, options: SweepOptions) -> int:
    """How many chunks a new run is cut into, unless their rows are given or set limits to it. The
    order that a seed fixes is one of chunks: it is the same whoever works.
    """
    is_free = job.settings.chunk_rows is None and job.selection.shuffle_seed is None
    if is_free and options.executor not in CLUSTERS:
        with suppress(MusterError):  # what is wrong is said where the run is opened
            slots = slots_of(would_take(options, read_settings()), options)
            return min(DEFAULT_SHARDS, SHARDS_PER_WORKER * max(2, len(slots)))
    return DEFAULT_SHARDS


def _known_files(fixed: Mapping[str, Any]) -> frozenset[str]:
    """Where the input of a run lay when it began. An earlier version took in what other runs have,
    where a pattern or a folder had it too; a run that did so goes on with the same files.
    """
    described = fixed.get("input")
    files = described.get("files") if isinstance(described, Mapping) else None
    return frozenset(os.path.abspath(file["path"]) for file in files or ())


#: Of an input of which no more is known, for each of its chunks: what `LEAST_ROWS` take at most.
_BYTES_AHEAD = 256 << 10


def _chunks_at_least(job: MapJob, path: str) -> int:
    """About how many chunks there will be: as many workers can have work."""
    size = sum(found.path.stat().st_size for found in find_files(path)[0])
    chunks = 1 + size // _BYTES_AHEAD
    limit = job.selection.limit
    return chunks if limit is None else min(chunks, 1 + limit // LEAST_ROWS)


def folder_of(job: MapJob, options: SweepOptions) -> RunFolder:
    """``--run-dir``, or a folder named after the output: the same output, the same run."""
    if options.run_dir is not None:
        return RunFolder(options.run_dir)
    digest = hashlib.blake2b(str(job.output.path.absolute()).encode(), digest_size=16).hexdigest()
    return folder_for(options.name or f"map-{job.name}", digest)


def head_start_of(
    job: MapJob, options: SweepOptions, folder: RunFolder
) -> AbstractContextManager[HeadStart | None]:
    """Workers that begin now, and import while we do and while the input is read; None where a
    worker would not be of this machine's processor, or is not sure to be needed: in a run that goes
    on, or has a folder for each stage. They end with the context unless they are handed over.
    """
    is_sure = options.executor == "local" and options.python is None and options.per_gpu == 1
    is_one = len(job.stages) == 1 or not job.settings.stage_by_stage
    is_new = not (folder.exists() or folder.identity_json.exists())
    if not (is_sure and is_one and is_new) or not isinstance(job.input, str):
        return nullcontext()
    with suppress(MusterError, OSError):  # what is wrong is said where the input is opened
        slots = slots_of(would_take(options, read_settings()), options)
        slots = slots[: _chunks_at_least(job, job.input)]
        if all(slot.kind == "cpu" for slot in slots):
            return closing(HeadStart(drawn_id(), slots, imports=CHUNKS))
    return nullcontext()
