"""``muster.map``: a data set through model stages, every record exactly once."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from muster.api.earlier_work import move_aside
from muster.api.launch import Audience, run_workload
from muster.api.map_job import (
    MapJob,
    Mapped,
    check_same,
    open_source,
    plan_of,
    workload_of,
)
from muster.api.map_publish import (
    Growing,
    Published,
    Tally,
    check_balance,
    check_not_input,
    check_output,
    claim_output,
    publish,
    read_published,
    size_of,
    tally,
    with_metadata,
)
from muster.api.map_view import RecordCount, cost_line
from muster.api.options import MapSettings, SweepOptions, options_of_call
from muster.api.placing import would_take
from muster.api.plans import check_same_plan
from muster.base.atomic_files import explain_os_error
from muster.base.errors import PlanMismatchError
from muster.base.settings import read_settings
from muster.base.signals import Requests, listening
from muster.base.target import refuse_while_imported
from muster.devices.discovery import discover
from muster.devices.placement import Placement
from muster.farm.canonical import name_with_hash
from muster.farm.view import RunView
from muster.pipeline.sinks.formats import check_place, spec_of
from muster.pipeline.sinks.unordered import discard
from muster.pipeline.sources.source import Selection
from muster.pipeline.sources.table import InputOptions
from muster.pipeline.stages import spec_of_object, specs_of_text
from muster.pipeline.worker import write_plan
from muster.plan.prices import read_prices
from muster.run.folder import RunFolder
from muster.run.lock import hold
from muster.run.record import read_run

#: What is tried again in a map are records, not tasks.
_AS_RECORDS = {"retries": "row_retries", "retry_exceptions": "exception_retries"}
_NEVER_S = 1e9  # there is no table to refresh
#: A worker without any sign of life for so long is taken for hung.
HUNG_AFTER_S = 1800.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class MapPreview:
    """What ``--dry-run`` shows."""

    folder: RunFolder
    num_rows: int
    num_shards: int
    is_new: bool
    placement: Placement
    columns: tuple[str, ...]


def map(
    stages: Any,
    source: str | Path | Iterable[Mapping[str, Any]],
    sink: str | Path,
    *,
    show: Any = None,
    **options: Any,
) -> Mapped:
    """Put every record of ``source`` through ``stages`` and write ``sink``, on every device.

    Args:
        stages: a function of one record, a class or dataclass instance with ``process`` or
            ``process_one``, a list of these, or ``"file.py:name"``. See `muster.pipeline.stages`.
        source: a path, folder, glob or ``hf:NAME``, or an iterable of records.
        sink: a .jsonl, .parquet or .csv file, or a folder.
        show: called about ten times a second with the state of affairs.
        options: fields of `SweepOptions` (``devices="cpu:4"``), `MapSettings`
            (``batch_size=64``), `Selection` (``limit=100``, ``where="level>=3"``) and
            `InputOptions` (``delimiter=";"``).

    Returns:
        Counts, the output's path and an exit code. Calling again continues.

    Raises what ``muster.sweep`` raises. Records that fail raise nothing: they are in the errors.
    """
    refuse_while_imported("muster.map")
    given = {_AS_RECORDS.get(name, name): value for name, value in options.items()}
    if "where" in given:
        where = given["where"]
        given["where"] = (where,) if isinstance(where, str) else tuple(where)
    settings, how, selection, reading = options_of_call(
        "map", given, MapSettings, SweepOptions, Selection, InputOptions
    )
    specs = _specs(stages)
    job = MapJob(
        name=specs[0].name,
        stages=specs,
        input=str(source) if isinstance(source, str | Path) else source,
        output=spec_of(str(sink)),
        selection=selection,
        options=reading,
        settings=settings,
    )
    return run_map(job, how, Audience() if show is None else Audience(show=show))


def _specs(stages: Any) -> tuple[Any, ...]:
    if isinstance(stages, str):
        return specs_of_text(stages, {}, Path.cwd())
    if isinstance(stages, list | tuple):
        return tuple(spec_of_object(stage) for stage in stages)
    return (spec_of_object(stages),)


# ---------------------------------------------------------------------- running


def run_map(job: MapJob, options: SweepOptions, audience: Audience) -> Mapped:
    """Run or continue a job; the engine behind ``muster.map`` and the command."""
    folder = folder_of(job, options)
    check_not_input(job)
    if options.restart:
        _begin_anew(job, folder, audience)
        options = dataclasses.replace(options, restart=False)
    try:
        with listening() as requests:
            if job.settings.stage_by_stage and len(job.stages) > 1:
                return _run_stages(job, options, audience, folder, requests)
            return _run_once(job, options, audience, folder)
    except OSError as error:
        raise explain_os_error(error, "write", folder.path) from error


def folder_of(job: MapJob, options: SweepOptions) -> RunFolder:
    """``--run-dir``, or a folder named after the output: the same output, the same run."""
    if options.run_dir is not None:
        return RunFolder(options.run_dir)
    digest = hashlib.blake2b(str(job.output.path.absolute()).encode(), digest_size=16).hexdigest()
    return RunFolder(Path("runs") / name_with_hash(options.name or f"map-{job.name}", digest))


def preview(job: MapJob, options: SweepOptions) -> MapPreview:
    """What a run would do. It looks at the input and writes nothing."""
    import tempfile

    folder = folder_of(job, options)
    check_not_input(job)
    check_output(folder, job.output, overwrite=job.settings.overwrite)
    with tempfile.TemporaryDirectory() as scratch:
        source = open_source(job, Path(scratch))
        described = source.describe()
        if folder.exists() and not options.restart:
            check_same(folder, job, described)
        shards = list(source.shards(job.settings.chunk_rows))
    return MapPreview(
        folder=folder,
        num_rows=sum(shard.count for shard in shards),
        num_shards=len(shards),
        is_new=not folder.exists(),
        placement=would_take(options, read_settings()),
        columns=tuple(described.get("columns") or ()),
    )


def _run_once(job: MapJob, options: SweepOptions, audience: Audience, folder: RunFolder) -> Mapped:
    began = time.monotonic()
    settings = read_settings()
    claim_output(folder, job.output, overwrite=job.settings.overwrite)
    check_place(job.output)
    folder.create()
    source = open_source(job, folder.map_input)
    if folder.exists():
        check_same(folder, job, source.describe())
    before = tally(folder)
    workload = workload_of(job, source)
    shards = [shard.count for shard in source.shards(job.settings.chunk_rows)]
    published = _still_there(folder, job, before)
    if published is not None:
        check_balance(folder, shards, published)
        check_same_plan(folder, read_run(folder), workload, options)
        return _mapped(folder, job, published, before, was_done=True)
    with hold(folder):  # not under the hands of another that works on it
        write_plan(folder.map_json, plan_of(job, options, source))
    if job.output.format != "parquet":
        for line in source.lost_as_text():
            audience.warn(line)
    count = RecordCount(sum(shards), before.num_in, before.num_rejected)
    growing = Growing(folder, job.output) if job.settings.unordered else None

    def show(view: RunView) -> None:
        audience.show(count.of(view))
        if growing is not None:
            growing.look(view)

    shown = dataclasses.replace(audience, show=show)
    hung = options.timeout_s if options.timeout_s is not None else HUNG_AFTER_S
    how = dataclasses.replace(
        options, run_dir=folder.path, timeout_s=hung, export_interval_s=_NEVER_S
    )
    run = run_workload(workload, how, shown)
    after = tally(folder)
    # Ended before all chunks were listed, the ledger has nothing open and yet not everything.
    was_ended = run.ending is not None and run.ending.interrupted
    is_whole = not (after.num_open or after.num_lost or was_ended)
    if is_whole and run.ending is not None and not run.ending.cancelled:
        audience.say("writing the output")
        check_balance(folder, shards)
        with hold(folder):
            published = publish(
                folder, with_metadata(job.output, source), after,
                keep_parts=job.settings.keep_parts,
                has_ids=job.settings.keeps_ids and "id" in source.describe()["columns"],
                appender=None if growing is None else growing.appender,
            )  # fmt: skip
    if growing is not None:
        growing.close()
    numbers = dict(count.last.numbers) if count.last is not None else {}
    seconds = time.monotonic() - began
    cost = cost_line(would_take(how, settings), discover(settings), seconds, read_prices(None))
    is_cut = was_ended or (run.ending is not None and run.ending.cancelled)
    return _mapped(
        folder, job, published, after, seconds=seconds, numbers=numbers,
        is_interrupted=is_cut and not is_whole,
        stop_signal=0 if run.ending is None else run.ending.stop_signal,
        causes=tuple(group.message for group in run.failures() if group.num_failed),
        cost=cost,
    )  # fmt: skip


def _mapped(
    folder: RunFolder, job: MapJob, published: Published | None, counts: Tally, **rest: Any
) -> Mapped:
    return Mapped(
        path=folder.path,
        output=job.output.path if published is not None else None,
        errors=folder.errors_jsonl if folder.errors_jsonl.exists() else None,
        num_total=counts.num_in + counts.num_open + counts.num_lost,
        num_in=counts.num_in,
        num_out=counts.num_out,
        num_rejected=counts.num_rejected,
        num_dropped=counts.num_dropped,
        num_blank=counts.num_blank,
        num_lost=counts.num_lost,
        notes=published.notes if published is not None else (),
        **rest,
    )


def _run_stages(
    job: MapJob, options: SweepOptions, audience: Audience, folder: RunFolder, requests: Requests
) -> Mapped:
    """Run stage by stage, each on the output of the one before; the last in the job's folder."""
    claim_output(folder, job.output, overwrite=job.settings.overwrite)
    last = len(job.stages) - 1
    source: Any = job.input
    selection, input_options = job.selection, job.options
    earlier: list[Mapped] = []
    for number, stage in enumerate(job.stages):
        home = folder if number == last else RunFolder(folder.stage(number))
        settings = dataclasses.replace(job.settings, stage_by_stage=False)
        output = job.output if number == last else spec_of(str(home.path / "output.jsonl"))
        part = dataclasses.replace(
            job, stages=(stage,), input=source, output=output, selection=selection,
            options=input_options, settings=settings,
            rehearse=job.rehearse if number == last else None,
        )  # fmt: skip
        audience.say(f"stage {number + 1} of {last + 1}: {stage.name}")
        done = _run_once(part, dataclasses.replace(options, run_dir=home.path), audience, home)
        if done.output is None:
            return done
        if number < last and requests.reason:
            return dataclasses.replace(
                done, output=None, is_interrupted=True, stop_signal=requests.reason
            )
        if number < last:
            earlier.append(done)
            source, selection, input_options = str(done.output), Selection(), InputOptions()
    return _with_earlier(done, earlier)


def _with_earlier(done: Mapped, earlier: list[Mapped]) -> Mapped:
    """Counts over all stages; the errors of each are in the folder of its stage."""
    notes = [
        f"{m.num_rejected:,} records failed in stage {n + 1}: {m.errors}"
        for n, m in enumerate(earlier)
        if m.num_rejected
    ]
    return dataclasses.replace(
        done,
        num_total=earlier[0].num_total,
        num_in=earlier[0].num_in,
        num_rejected=done.num_rejected + sum(m.num_rejected for m in earlier),
        num_dropped=done.num_dropped + sum(m.num_dropped for m in earlier),
        seconds=done.seconds + sum(m.seconds for m in earlier),
        was_done=done.was_done and all(m.was_done for m in earlier),
        notes=(*done.notes, *notes),
    )


def _still_there(folder: RunFolder, job: MapJob, counts: Tally) -> Published | None:
    """The record of the output if it is written and unchanged, so that nothing is left to do."""
    published = read_published(folder)
    if published is None or counts.num_open or counts.num_lost:
        return None
    path = job.output.path
    if path.exists() and size_of(path) == published.size:
        return published
    if folder.parts.exists():
        return None  # written again from the chunks
    raise PlanMismatchError(
        f"The output {path} of this finished run was changed or removed since, and its chunks are "
        "gone as well.",
        hint="make it again from the start with --restart --overwrite (and --keep-parts to keep "
        "the chunks).",
    )


def _begin_anew(job: MapJob, folder: RunFolder, audience: Audience) -> None:
    """``--restart``: put the run aside; the new one may replace its output, but nobody else's.

    What an unfinished ``--unordered`` has left goes before the rename: a kill between the two
    leaves the old run, which makes it again from its chunks.
    """
    if not job.settings.overwrite:
        check_output(folder, job.output, overwrite=False)
    move_aside(folder, "map", audience.say, first=lambda: discard(job.output))
