"""What may not change between two starts of a map, and its chunks as the tasks of a farm."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

from muster.api.maps.job import CHUNKS, MapJob
from muster.api.start.options import SweepOptions
from muster.api.sweeps.workload import Workload
from muster.base.cells import placed
from muster.base.code import code_of
from muster.base.codec import as_read_back, read_json
from muster.base.errors import MusterError
from muster.farm.canonical import payload_and_key
from muster.farm.decisions import RetryPolicy
from muster.farm.executors.worker_process import worker_python
from muster.farm.plan import Numbers
from muster.farm.task import NewTask, Outcome, TargetSpec, TaskState
from muster.pipeline.sources.files import HASHED_WHOLE, fingerprint
from muster.pipeline.sources.source import DEFAULT_SHARDS, Source
from muster.pipeline.sources.table import changes, identity
from muster.pipeline.worker import MapPlan, write_plan
from muster.run.folder import RunFolder
from muster.run.record import read_run

_TARGET = TargetSpec(
    name=f"{CHUNKS}:run_chunk",
    location=CHUNKS,
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


def _fixed(
    job: MapJob, num_chunks: int, described: dict[str, Any], home: RunFolder
) -> dict[str, Any]:
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
    if num_chunks != DEFAULT_SHARDS:  # of which earlier versions did not tell
        fixed["chunks"] = num_chunks
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
    fixed = _fixed(job, source.num_shards, described, home)
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
