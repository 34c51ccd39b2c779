"""The options of a sweep and of a map, one value each; defaults live here only."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from muster.base.errors import UsageError
from muster.farm.executors.cluster import ClusterRequest
from muster.monitor.recorder import check_interval


@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """How a sweep is run, apart from what it runs.

    Attributes
        devices: ``auto``, a number of GPUs, a list of GPUs, ``cpu`` or ``cpu:8``.
        gpu_ids: GPUs as a list, where ``0`` is GPU 0; instead of ``devices``.
        max_gpus: use at most this many GPUs; instead of ``devices``.
        per_gpu: workers that share a GPU, or ``auto`` to pack by measured memory.
        gpus_per_task: GPUs that each task sees.
        force: use GPUs that other processes or other runs hold.
        retries: how often a crashed task is tried again on a fresh worker.
        retry_exceptions: how often a task that raised is tried again.
        timeout_s: a task is killed after this time, with its process group.
        keep_going: do not pause when the first tasks all fail in the same way.
        allow_changed_code: go on although the code has changed; the table then has a column `code`.
        restart: begin anew; what the run folder holds is moved aside and kept.
        run_dir: the run folder; default ``runs/<name>-<hash>``.
        name: the name in that default.
        export_interval_s: how often the exported table is refreshed while running.
        monitor_interval_s: how often the host and the run's GPUs are sampled into monitor.csv; 0
            records nothing.
        executor: ``local``, ``slurm``, ``ray`` or ``inline`` (in this process, for a debugger).
        cluster: what is asked of SLURM or Ray, instead of ``devices``.
    """

    devices: str = "auto"
    gpu_ids: str | None = None
    max_gpus: int | None = None
    per_gpu: int | Literal["auto"] = 1
    gpus_per_task: int = 1
    force: bool = False
    retries: int = 1
    retry_exceptions: int = 0
    timeout_s: float | None = None
    keep_going: bool = False
    allow_changed_code: bool = False
    restart: bool = False
    run_dir: Path | None = None
    name: str | None = None
    export_interval_s: float = 60.0
    monitor_interval_s: float = 5.0
    executor: str = "local"
    cluster: ClusterRequest = field(default_factory=ClusterRequest)

    def __post_init__(self) -> None:
        for name, least in (("retries", 0), ("retry_exceptions", 0), ("gpus_per_task", 1)):
            value = getattr(self, name)
            if value < least:
                flag = "--" + name.replace("_", "-")
                raise UsageError(f"{flag} {value} is too small.", hint=f"write {least} or more.")
        if self.timeout_s is not None and self.timeout_s <= 0:
            raise UsageError(f"--timeout {self.timeout_s} leaves no time to run.")
        if self.export_interval_s <= 0:
            raise UsageError(f"--export-interval {self.export_interval_s} is not a time.")
        check_interval(self.monitor_interval_s, "--monitor-interval", may_be_0=True)
        if self.per_gpu != "auto" and self.per_gpu < 1:
            raise UsageError(
                f"--per-gpu {self.per_gpu} is too small.", hint="write 1, 2, … or auto."
            )
        if self.max_gpus is not None and self.max_gpus < 1:
            raise UsageError(
                f"--max-gpus {self.max_gpus} leaves no GPU.", hint="use --devices cpu for the CPU."
            )


@dataclass(frozen=True, kw_only=True)
class MapSettings:
    """How records are handled.

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


_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|sec|m|min|h|d)?")
_UNITS = {"ms": 0.001, "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def parse_duration(text: str, flag: str) -> float:
    """Seconds in ``90``, ``90s``, ``30m``, ``2h``, ``1h30m``, ``1d``.

    >>> parse_duration("1h30m", "--timeout")
    5400.0
    """
    parts = list(_DURATION.finditer(text))
    if not parts or "".join(part.group(0) for part in parts) != text.strip():
        raise UsageError(
            f"{flag} {text}: cannot read this as a duration.", hint="write 90, 30m, 2h or 1h30m."
        )
    return sum(float(part.group(1)) * _UNITS[part.group(2) or "s"] for part in parts)
