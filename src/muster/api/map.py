"""``muster.map``: a data set through model stages, every record exactly once."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muster.api.launch import Audience, Prepared, prepare, run_workload
from muster.api.maps.cost import cost_of
from muster.api.maps.job import MapJob, Mapped, folder_of, head_start_of, open_source
from muster.api.maps.plan import workload_of
from muster.api.maps.progress import (
    CopyingAhead,
    Growing,
    ProgressCurve,
    RecordCount,
    Rejects,
    rejects_so_far,
)
from muster.api.maps.publish import (
    Published,
    Tally,
    check_balance,
    check_not_among_input,
    check_not_input,
    check_output,
    claim_output,
    publish,
    read_published,
    sink_of,
    size_of,
    tally,
)
from muster.api.start.earlier_work import move_aside
from muster.api.start.limits import refuse_to_begin
from muster.api.start.options import MapSettings, SweepOptions, options_of_call
from muster.api.start.placing import hand_on, would_take
from muster.api.sweeps.plans import check_same_plan
from muster.base.atomic_files import explain_os_error, sweep
from muster.base.errors import PlanMismatchError, UsageError
from muster.base.settings import read_settings
from muster.base.signals import listening
from muster.base.target import refuse_while_imported
from muster.farm.plan import Ending
from muster.farm.view import RunView
from muster.pipeline.sinks.formats import check_place, spec_of
from muster.pipeline.sinks.parts_ahead import serves
from muster.pipeline.sinks.unordered import discard
from muster.pipeline.sources.source import Selection
from muster.pipeline.sources.table import InputOptions
from muster.pipeline.stages import spec_of_object, specs_of_text
from muster.run.folder import RunFolder
from muster.run.record import read_run

if TYPE_CHECKING:
    from muster.farm.executors.head_start import HeadStart

#: What is tried again in a map are records, not tasks.
_AS_RECORDS = {"retries": "row_retries", "retry_exceptions": "exception_retries"}
_NOTHING_LEFT = (
    "no record is left in the output: a stage returned None for it, or --where leaves it out (a "
    "stage that changes its record must return it as well)"
)
_NEVER_S = 1e9  # there is no table to refresh
#: A worker without any sign of life for so long is taken for hung.
HUNG_AFTER_S = 1800.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class MapPreview:
    """What ``--dry-run`` shows; with ``--stage-by-stage``, of the first stage."""

    folder: RunFolder
    prepared: Prepared
    num_rows: int
    columns: tuple[str, ...]
    left_out: str


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
        show: called about ten times a second with a picture of the run, a ``RunView``.
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
        name=specs[0].name if specs else "stages",
        stages=specs,
        input=str(source) if isinstance(source, str | Path) else source,
        output=spec_of(str(sink)),
        selection=selection,
        options=reading,
        settings=settings,
    )
    from muster.api.notebook import watched  # here: the command has a screen of its own

    with watched(show, "the records and the reasons are in errors.jsonl") as audience:
        return run_map(job, how, audience)


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
    if options.restart or not folder.exists():
        check_not_among_input(job)
    if options.memory_mib is not None:
        raise UsageError(
            "memory_mib has no effect on a map, whose chunks go on with other workers.",
            hint="max_worker_memory_mib replaces a worker that holds more, between two batches.",
        )
    if options.restart:
        with listening() as requests:
            refuse_to_begin(folder, options, requests, is_new=True)
        _begin_anew(job, folder, audience)
        options = dataclasses.replace(options, restart=False)
    parts, done = _parts(job, folder), list[Mapped]()
    try:
        with listening() as requests:
            for part, home in parts:
                claim_output(home, part.output, overwrite=job.settings.overwrite)
            for number, (part, home) in enumerate(parts, start=1):
                if len(parts) > 1:
                    audience.say(f"stage {number} of {len(parts)}: {part.stages[0].name}")
                if number > 1:
                    hand_on(parts[number - 2][1], home)
                one = _run_once(part, options, audience, home)
                if one.output is None:
                    return one
                if requests.reason and number < len(parts):
                    return dataclasses.replace(
                        one, output=None, is_interrupted=True, stop_signal=requests.reason
                    )
                done.append(one)
            return _in_all(done)
    except OSError as error:
        raise explain_os_error(error, "write", folder.path) from error


def _parts(job: MapJob, folder: RunFolder) -> list[tuple[MapJob, RunFolder]]:
    """The job and its folder; with ``--stage-by-stage`` a job for each stage.

    Each reads the output of the one before, in a folder of its own; the last has the job's folder.
    """
    if not job.settings.stage_by_stage or len(job.stages) < 2:
        return [(job, folder)]
    settings = dataclasses.replace(job.settings, stage_by_stage=False)
    parts: list[tuple[MapJob, RunFolder]] = []
    for number, stage in enumerate(job.stages):
        home = RunFolder(folder.stage(number))
        part = dataclasses.replace(
            job, stages=(stage,), output=spec_of(str(_output_of_stage(home))),
            settings=settings, rehearse=None,
        )  # fmt: skip
        if parts:
            before = str(parts[-1][0].output.path)
            part = dataclasses.replace(
                part, input=before, selection=Selection(), options=InputOptions()
            )
        parts.append((part, home))
    last = dataclasses.replace(parts[-1][0], output=job.output, rehearse=job.rehearse)
    return [*parts[:-1], (last, folder)]


def _output_of_stage(home: RunFolder) -> Path:
    return home.path / "output.jsonl"


def preview(job: MapJob, options: SweepOptions) -> MapPreview:
    """What a run would do. It looks at the input and writes nothing."""
    import tempfile

    folder = folder_of(job, options)
    check_not_input(job)
    if options.restart or not folder.exists():
        check_not_among_input(job)
    check_output(folder, job.output, overwrite=job.settings.overwrite)
    part, home = _parts(job, folder)[0]
    with tempfile.TemporaryDirectory() as scratch:
        source = open_source(part, options, Path(scratch), None if options.restart else home)
        workload = workload_of(part, options, source, home)
        return MapPreview(
            folder=folder,
            prepared=prepare(workload, dataclasses.replace(options, run_dir=home.path)),
            num_rows=sum(shard.count for shard in source.shards(job.settings.chunk_rows)),
            columns=tuple(source.describe()["columns"]),
            left_out=source.left_out,
        )


def _run_once(job: MapJob, options: SweepOptions, audience: Audience, folder: RunFolder) -> Mapped:
    check_place(job.output)
    if folder.path.is_symlink():  # what it leads to may have been moved aside
        folder.create()
    with head_start_of(job, options, folder) as head_start:
        return _run_opened(job, options, audience, folder, head_start)


def _run_opened(
    job: MapJob, options: SweepOptions, audience: Audience, folder: RunFolder,
    head_start: HeadStart | None,
) -> Mapped:  # fmt: skip
    began, settings = time.monotonic(), read_settings()
    source = open_source(job, options, folder.map_input, folder)
    workload = workload_of(job, options, source, folder)
    if folder.exists():
        check_same_plan(folder, read_run(folder), workload, options)
    counts = tally(folder)
    shards = [shard.count for shard in source.shards(job.settings.chunk_rows)]
    published = _still_there(folder, job, counts)
    if published is not None:
        check_balance(folder, shards, published)
        return _mapped(folder, job, published, counts, was_done=True)
    if source.left_out:
        audience.warn(f"{job.input} is read without {source.left_out}; name one to read it")
    if job.output.format != "parquet":
        for line in source.lost_as_text():
            audience.warn(line)
    has_rejects = counts.num_rejected or any(kept.bad_size for kept in counts.begun)
    rejects = rejects_so_far(folder, counts.begun) if has_rejects else Rejects()
    before = counts.num_in + counts.num_blank + sum(kept.num_rows for kept in counts.begun)
    count = RecordCount(sum(shards), before, rejects.num_rows)
    curve = ProgressCurve(folder, count, rejects, audience.warn)
    growing = Growing(folder, job.output) if job.settings.unordered else None
    copying = None
    if growing is None and serves(job.output):
        copying = CopyingAhead(folder, lambda: sink_of(folder, job, source), shards)

    def show(view: RunView) -> None:
        audience.show(count.of(view))
        curve.look()
        if growing is not None:
            growing.look(view)
        if copying is not None:
            copying.look(view)

    def finish(folder: RunFolder, ending: Ending) -> None:
        nonlocal counts, published
        counts = tally(folder)
        # A map that ended before all chunks were listed has none that is open, and is not done.
        is_done = not (counts.num_open or counts.num_lost or ending.interrupted)
        curve.end(counts if is_done else None)
        if is_done:
            audience.say("writing the output")
            check_balance(folder, shards)
            ahead = None if copying is None else copying.end()
            appender = None if growing is None else growing.appender
            published = publish(folder, job, source, counts, appender, ahead)
        ending.is_lacking = published is None or bool(counts.num_rejected)
        if growing is not None:
            growing.close()

    how = dataclasses.replace(
        options,
        run_dir=folder.path,
        timeout_s=HUNG_AFTER_S if options.timeout_s is None else options.timeout_s,
        export_interval_s=_NEVER_S,
    )
    workload = dataclasses.replace(workload, finish=finish)
    try:
        shown = dataclasses.replace(audience, show=show)
        run = run_workload(workload, how, shown, head_start)
    finally:
        if copying is not None and (left := copying.end()) is not None:
            left.discard()
    assert run.ending is not None
    numbers = dict(count.last.numbers) if count.last is not None else {}
    seconds = time.monotonic() - began
    return _mapped(
        folder, job, published, counts, seconds=seconds, numbers=numbers,
        is_interrupted=run.ending.interrupted or run.ending.cancelled,
        stop_signal=run.ending.stop_signal,
        causes=tuple(group.message for group in run.failures() if group.num_failed),
        cost=cost_of(would_take(how, settings), settings, seconds),
    )  # fmt: skip


def _mapped(
    folder: RunFolder, job: MapJob, published: Published | None, counts: Tally, **rest: Any
) -> Mapped:
    sums = {name: value for name, value in vars(counts).items() if name != "begun"}
    notes = published.notes if published is not None else ()
    if published is not None and counts.num_dropped and not counts.num_out:
        notes += (_NOTHING_LEFT,)
    return Mapped(
        path=folder.path,
        output=job.output.path if published is not None else None,
        errors=folder.errors_jsonl if folder.errors_jsonl.exists() else None,
        num_total=counts.num_in + sums.pop("num_open") + counts.num_lost,
        notes=notes,
        **sums,
        **rest,
    )


def _in_all(stages: Sequence[Mapped]) -> Mapped:
    """The counts of all stages together; the errors of each are in the folder of its stage."""
    *earlier, last = stages
    notes = [
        f"{m.num_rejected:,} record{'s' if m.num_rejected > 1 else ''} failed in stage {number}: "
        f"{m.errors}"
        for number, m in enumerate(earlier, start=1)
        if m.num_rejected
    ]
    return dataclasses.replace(
        last,
        num_total=stages[0].num_total,
        num_in=stages[0].num_in,
        num_rejected=sum(m.num_rejected for m in stages),
        num_dropped=sum(m.num_dropped for m in stages),
        seconds=sum(m.seconds for m in stages),
        was_done=all(m.was_done for m in stages),
        notes=(*last.notes, *notes),
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

    What an unfinished run has left beside its output goes before the rename: a kill between the
    two leaves the old run, which makes it again from its chunks.
    """
    if not job.settings.overwrite:
        check_output(folder, job.output, overwrite=False)

    def clean() -> None:
        discard(job.output)
        if folder.exists():
            before = read_run(folder).fixed.get("output")
            if isinstance(before, str):
                sweep(Path(before))
        for number in range(len(job.stages)):
            sweep(_output_of_stage(RunFolder(folder.stage(number))))

    move_aside(folder, "map", audience.say, first=clean)
