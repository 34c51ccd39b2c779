"""What a map does, as values: the job, its settings, what came of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from muster.base.errors import EXIT_OK, EXIT_SOME_FAILED, UsageError
from muster.base.signals import stop_code
from muster.pipeline.plan import StageSpec
from muster.pipeline.sinks.model import SinkSpec
from muster.pipeline.sources.model import Selection
from muster.pipeline.sources.table import InputOptions
from muster.run.folder import RunFolder


@dataclass(frozen=True, kw_only=True)
class MapSettings:
    """How records are handled. Defaults live here only.

    Attributes
        batch_size: rows that go into a stage together at first; 0: what the stages ask for.
        chunk_rows: rows per shard; None: from the size of the input.
        keeps_ids: give records an ``id`` (their row in the input) unless they have one.
        row_retries: how often a record that kills or hangs its worker is tried again.
        exception_retries: how often a record is tried again for which a stage raised.
        unordered: write chunks as they are ready instead of in input order.
        stage_by_stage: write each stage's output before the next begins.
        max_worker_memory_mib: a worker that holds more is replaced between batches.
        keep_parts: leave the chunks' files in the run folder when the output is written.
        overwrite: replace an output that exists and is not this run's.
    """

    batch_size: int = 0
    chunk_rows: int | None = None
    keeps_ids: bool = True
    row_retries: int = 1
    exception_retries: int = 0
    unordered: bool = False
    stage_by_stage: bool = False
    max_worker_memory_mib: float | None = None
    keep_parts: bool = False
    overwrite: bool = False

    def __post_init__(self) -> None:
        if self.batch_size < 0:
            raise UsageError(f"--batch-size {self.batch_size}: write 1 or more.")
        if self.chunk_rows is not None and self.chunk_rows < 1:
            raise UsageError(f"--chunk-rows {self.chunk_rows}: write 1 or more.")
        if self.row_retries < 0:
            raise UsageError(f"--retries {self.row_retries}: write 0 or more.")
        if self.exception_retries < 0:
            raise UsageError(f"--retry-exceptions {self.exception_retries}: write 0 or more.")
        if self.max_worker_memory_mib is not None and self.max_worker_memory_mib <= 0:
            raise UsageError("--max-worker-memory must be more than nothing.")


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


@dataclass(frozen=True, kw_only=True)
class Mapped:
    """What came of a map. ``output`` is None while it is not written.

    ``num_in`` = rows that are done; of these ``num_rejected`` are in ``errors`` and
    ``num_dropped`` were dropped by a stage or by ``where``. ``num_blank``: blank lines, which are
    no rows.
    ``num_lost``: rows of chunks that failed as a whole, and ``causes`` why.
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
