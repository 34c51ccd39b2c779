"""What a map does, as values: the job and its settings, what may not change, tasks, result."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from muster.api.start.options import MapSettings, SweepOptions
from muster.api.start.placing import slots_of, would_take
from muster.api.sweeps.workload import Workload
from muster.base.cells import placed
from muster.base.code import code_of
from muster.base.codec import as_read_back, read_json
from muster.base.errors import EXIT_OK, EXIT_SOME_FAILED, MusterError, UsageError
from muster.base.settings import read_settings
from muster.base.signals import stop_code
from muster.farm.canonical import payload_and_key
from muster.farm.decisions import RetryPolicy
from muster.farm.executors.head_start import HeadStart
from muster.farm.executors.worker_process import worker_python
from muster.farm.plan import Numbers
from muster.farm.task import NewTask, Outcome, TargetSpec, TaskState
from muster.pipeline.sinks.formats import SinkSpec
from muster.pipeline.sources.files import HASHED_WHOLE, find_files, fingerprint
from muster.pipeline.sources.source import LEAST_ROWS, Selection, Source
from muster.pipeline.sources.table import InputOptions, changes, identity, open_input
from muster.pipeline.stages import StageSpec
from muster.pipeline.worker import MapPlan, write_plan
from muster.run.folder import RunFolder
from muster.run.record import drawn_id, read_run


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


_TARGET = TargetSpec(
    name="muster.pipeline.chunk:run_chunk",
    location="muster.pipeline.chunk",
    attribute="run_chunk",
    is_divisible=True,
)
#: A chunk may lose many workers: each loss narrows down the record that is to blame for it.
_RETRY = RetryPolicy(
    exception_retries=20,
    backoff_s=0.05,
    backoff_cap_s=2.0,
    by_outcome=dict.fromkeys(
        (Outcome.CRASH, Outcome.BROKEN_CONTEXT, Outcome.TIMEOUT, Outcome.HOST_OOM), 1000
    ),
)


def open_source(job: MapJob, folder: Path, home: RunFolder | None) -> Source:
    """``home``: the folder of the run, which may have been begun; None for a run from the start."""
    known = frozenset[str]() if home is None else _known_files(home)
    source = open_input(job.input, job.selection, job.options, folder, known)
    job.check_columns(source.describe()["columns"])
    return source


def _known_files(home: RunFolder) -> frozenset[str]:
    """Where the input of a run lay when it began. An earlier version took in what other runs have,
    where a pattern or a folder had it too; a run that did so goes on with the same files.
    """
    described = read_run(home).fixed.get("input") if home.exists() else None
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


def head_start_of(
    job: MapJob, options: SweepOptions, folder: RunFolder
) -> AbstractContextManager[HeadStart | None]:
    """Workers that begin now and import while the input is read; None where a worker would not be
    of this machine's processor, or is not sure to be needed: in a run that goes on. They end with
    the context unless they are handed over.
    """
    is_sure = options.executor == "local" and options.python is None and options.per_gpu == 1
    is_new = not (folder.exists() or folder.identity_json.exists())
    if not is_sure or not is_new or not isinstance(job.input, str):
        return nullcontext()
    with suppress(MusterError, OSError):  # what is wrong is said where the input is opened
        slots = slots_of(would_take(options, read_settings()), options)
        slots = slots[: _chunks_at_least(job, job.input)]
        if all(slot.kind == "cpu" for slot in slots):
            return closing(HeadStart(drawn_id(), slots, imports=_TARGET.location))
    return nullcontext()


def _fixed(job: MapJob, described: dict[str, Any], home: RunFolder) -> dict[str, Any]:
    """What may not change between two commands on one run folder. A file that an earlier version
    knew by its time keeps that time in ``described``.
    """
    stages = [dict(stage.values) for stage in job.stages]
    fixed = {
        "stages": [stage.name for stage in job.stages],
        "flags": as_read_back(stages),
        "input": as_read_back(identity(described)),
        "output": str(job.output.path.absolute()),
        "ids": job.settings.keeps_ids,
        "unordered": job.settings.unordered,
        "chunk_rows": job.settings.chunk_rows,
        "place": str(home.whole.absolute()),
    }
    if home.exists():
        before = read_run(home).fixed
        _name_as_before(fixed, before, home)
        if described["kind"] == "parquet":
            _hash_as_before(fixed, before, described, home)
    return fixed


def _name_as_before(fixed: dict[str, Any], before: Mapping[str, Any], home: RunFolder) -> None:
    """Call the files of stages in the run folder what an earlier start called them: the folder may
    have been moved since. Whether they are still the same, their sizes and hashes tell.
    """
    whole = home.whole.absolute()
    place = before.get("place")
    if place is None:  # version 0.1.0 did not note it
        del fixed["place"]
    else:
        fixed["place"] = place

    def name(path: str, known: Any) -> str:
        if not isinstance(known, str):
            return path
        if _resolved(known) == _resolved(path):
            return known  # said from another working folder, with ".."
        if not Path(path).is_relative_to(whole):
            return path
        tail = Path(path).relative_to(whole)
        if isinstance(place, str):
            return known if Path(known) == Path(place, tail) else path
        return known if known.endswith(f"/{tail.as_posix()}") else path

    fixed["output"] = name(fixed["output"], before.get("output"))
    described = before.get("input")
    files = described.get("files") if isinstance(described, Mapping) else None
    for file, known in zip(fixed["input"]["files"], files or [], strict=False):
        file["path"] = name(file["path"], known.get("path"))


def _hash_as_before(
    fixed: dict[str, Any], before: Mapping[str, Any], described: dict[str, Any], home: RunFolder
) -> None:
    """Give large Parquet files the hash that version 0.1.0 gave them, where it is theirs: it had
    their time in it. The time of then is in the plan of the last start; a copy has another.
    """
    known = before.get("input", {}).get("files") or []
    times = _times_of_last_start(home)
    for number, (file, old) in enumerate(zip(fixed["input"]["files"], known, strict=False)):
        if file["size"] <= HASHED_WHOLE or file["hash"] == old.get("hash"):
            continue
        now = described["files"][number]
        for time_ns in (now["mtime_ns"], *times[number : number + 1]):
            found = fingerprint(Path(now["path"]), always_timed=True, time_ns=time_ns)
            if found["hash"] == old.get("hash"):
                file["hash"] = found["hash"]
                now["mtime_ns"] = time_ns  # the next start finds it in the plan of this one
                break


def _times_of_last_start(home: RunFolder) -> list[int]:
    """The times of the input's files as the workers of the last start knew them."""
    with suppress(MusterError):
        return [file["mtime_ns"] for file in read_json(home.map_json, "plan")["source"]["files"]]
    return []


def _resolved(path: str) -> Path:
    """Without ``..`` and links, save that of the last name: it may be made to name another file."""
    return Path(path).parent.resolve() / Path(path).name


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What is another plan: input, stages, flags, output."""
    lines = []
    if old["input"] != new["input"]:
        lines += changes(old["input"], new["input"]) or ["the input has changed"]
    lines += [
        f"{name}: {json.dumps(old.get(name))} -> {json.dumps(new[name])}"
        for name in ("stages", "output", "ids", "unordered", "chunk_rows")
        if old.get(name) != new[name]
    ]
    if old["stages"] == new["stages"]:
        lines += [
            f"{name}: {json.dumps(before.get(name))} -> {json.dumps(after.get(name))}"
            for before, after in zip(old["flags"], new["flags"], strict=False)
            for name in dict.fromkeys((*before, *after))
            if before.get(name) != after.get(name)
        ]
    return lines


def _plan_of(
    job: MapJob, options: SweepOptions, described: Mapping[str, Any], home: RunFolder
) -> MapPlan:
    settings = job.settings
    stages = tuple(replace(s, location=placed(s.location, home.path)) for s in job.stages)
    return MapPlan(
        source=described,
        stages=stages,
        base_folder=str(Path.cwd()),
        batch_size=settings.batch_size,
        keeps_ids=settings.keeps_ids,
        row_retries=settings.row_retries,
        exception_retries=settings.exception_retries,
        keep_going=options.keep_going,
        keeps_types=job.output.format == "parquet",
        max_worker_memory_mib=settings.max_worker_memory_mib,
        session=time.time_ns() & 0xFFFF_FFFF,
    )


def workload_of(job: MapJob, options: SweepOptions, source: Source, home: RunFolder) -> Workload:
    """``home``: the folder of the run."""
    described = deepcopy(dict(source.describe()))
    fixed = _fixed(job, described, home)
    plan = _plan_of(job, options, described, home)

    def feed(numbers: Numbers) -> Iterator[NewTask]:
        make = payload_and_key(_TARGET.name)
        for shard in source.shards(job.settings.chunk_rows):
            params = {**shard._asdict(), "place": list(shard.place)}
            payload, key = make({**params, "start": 0, "stop": shard.count})
            yield NewTask(key, numbers[_TARGET.name], payload)

    total = sum(1 for _ in source.shards(job.settings.chunk_rows))
    refs = [spec.ref for spec in job.stages]
    code, code_before = code_of(refs), None
    if options.python is not None:
        code, code_before = code_of(refs, other=worker_python(options.python).modules), code
    return Workload(
        name=job.name,
        targets=(_TARGET,),
        code=code,
        code_before=code_before,
        spec=fixed,
        fixed=fixed,
        total=total,
        feed=feed,
        parameters=("order", "start", "stop"),
        # Each of eight records in a row with all its tries.
        retry=replace(_RETRY, breaks_in_a_row=8 * (job.settings.row_retries + 1)),
        kind="map",
        difference=_differences,
        begin=lambda folder: write_plan(folder.map_json, plan),
        rehearse=job.rehearse,
        reopens=(TaskState.FAILED, TaskState.CANCELLED),
    )
