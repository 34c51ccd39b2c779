"""What a report says about a map: how many records went where, and a recipe's own numbers."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from muster import plotting
from muster.api.maps.publish import Tally, read_published, tally
from muster.api.recipe import MapRecipe
from muster.api.report.about import Effort, failure_blocks, record_failures
from muster.api.report.content import Block, Health, Table, Text, facts_of
from muster.api.report.sweep import Content, pictures_of
from muster.api.runs import Run
from muster.base.codec import read_object, write_json
from muster.base.shown_text import count
from muster.pipeline.sinks.formats import SinkSpec
from muster.run.folder import RunFolder
from muster.run.record import read_run

_COLUMNS = ("", "in", "out", "rejected", "dropped", "lost", "waiting")


class MapMaker(NamedTuple):
    """The recipe that a map was made from, with the config of this run and where its output is."""

    recipe: MapRecipe
    config: Any
    output: SinkSpec


def map_content(run: Run, maker: MapMaker | None, place: RunFolder) -> Content:
    """Write a recipe's numbers and figures into ``place`` and say what is in them.

    Without a maker, or where the output is gone, it shows those that the run folder holds.
    """
    folder, stored = run.folder, run.stored
    folders = stage_folders(folder)
    specs = [read_run(each).spec for each in folders]
    counts = [tally(each) for each in folders]
    state, health = map_state(run, counts)
    summary, figures, remarks = _of_recipe(folder, maker, place)
    stages = [" → ".join(spec["stages"]) for spec in specs]
    published = read_published(folder)
    effort = Effort()
    failures: list[Block] = []
    for each in folders:
        _add_up(each, effort)
        groups = Run(each.path).failures() if each.ledger.exists() else []
        failures += [*failure_blocks(groups), *record_failures(each)]
    return Content(
        lead=f"A map of records through {' → '.join(stages)}.",
        state=state,
        health=health,
        failures=failures,
        figures=[*pictures_of(figures, f"the map {folder.name}"), *remarks],
        results=[
            Table("Records", _COLUMNS, tuple(map(_row, stages, counts))),
            facts_of("Summary of the output", summary),
            *(Text(note) for note in (published.notes if published else ())),
        ],
        settings={
            "What was run": _what(specs),
            "How it was run": stored.options,
        },
        effort=[effort.table()],
        files=figures,
    )


def _of_recipe(
    folder: RunFolder, maker: MapMaker | None, place: RunFolder
) -> tuple[Mapping[str, Any], list[Path], list[Block]]:
    published = read_published(folder)
    if maker is None or published is None or not Path(published.output).exists():
        summary = read_object(folder.table_csv.with_suffix(".json"))
        return summary, sorted(folder.figures.glob("*.png")), []
    sink = dataclasses.replace(maker.output, path=Path(published.output))
    remarks: list[Block] = []
    numbers, figures = recipe_of_output(
        maker._replace(output=sink), place, lambda text: remarks.append(Text(text))
    )
    return numbers, figures, remarks


def recipe_of_output(
    maker: MapMaker, place: RunFolder, remark: Callable[[str], None]
) -> tuple[Mapping[str, Any], list[Path]]:
    """Write a recipe's own numbers and figures of an output into ``place``. ``remark`` hears where
    matplotlib is missing.
    """
    from muster.pipeline.sinks.formats import read_output

    recipe, config, sink = maker
    numbers: Mapping[str, Any] = {}
    figures: list[Path] = []
    if recipe.summarise is not None:
        numbers = recipe.summarise(config, read_output(sink))
        write_json(place.table_csv.with_suffix(".json"), numbers)
    if recipe.draw is not None:
        place.figures.mkdir(exist_ok=True)
        with plotting.or_remark(remark):
            figures = recipe.draw(config, read_output(sink), place.figures)
    return numbers, figures


def stage_folders(folder: RunFolder) -> list[RunFolder]:
    """The run folder of each stage with ``--stage-by-stage``, else only this one."""
    found: list[RunFolder] = []
    # As a folder that may not be looked into seems to hold all of them, this asks for the file.
    while os.access((before := RunFolder(folder.stage(len(found)))).run_json, os.F_OK):
        found.append(before)
    return [*found, folder]


def map_state(run: Run, counts: Sequence[Tally]) -> tuple[str, Health]:
    """What became of the records of the first stage, and how many the later ones rejected.

    ``counts``: of each of `stage_folders`.
    """
    first = counts[0]
    total = first.num_in + first.num_lost + first.num_open
    done = f"{first.num_in + first.num_begun:,} of {count(total, 'record')} done"
    rejected, lost = (
        sum(getattr(c, f"num_{word}") for c in counts) for word in ("rejected", "lost")
    )
    bad = [f"{n:,} {word}" for n, word in ((rejected, "rejected"), (lost, "lost")) if n]
    told = ", ".join((done, *bad))
    if run.status().is_running:
        return f"Still running: {told}.", Health.OPEN
    if any(each.num_open for each in counts) or not total:
        return f"Unfinished: {told}.", Health.OPEN
    if bad:
        return f"Finished with failures: {told}.", Health.BAD
    if read_published(run.folder) is None:
        return f"Unfinished: {told}, but the output is not written yet.", Health.OPEN
    return f"Finished: {told}.", Health.GOOD


def _row(name: str, counts: Tally) -> tuple[Any, ...]:
    return (
        name, counts.num_in, counts.num_out, counts.num_rejected, counts.num_dropped,
        counts.num_lost, counts.num_open,
    )  # fmt: skip


def _what(specs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The input in a few words, each stage with its flags, and the rest as it is."""
    source = dict(specs[0]["input"])
    files = source.pop("files", None)
    if files:
        source["files"] = len(files)
        source["first file"] = files[0].get("path") if isinstance(files[0], dict) else files[0]
    stages = [name for spec in specs for name in spec["stages"]]
    flags = [values for spec in specs for values in spec["flags"]]
    rest = {k: v for k, v in specs[-1].items() if k not in ("input", "stages", "flags")}
    given = {name: values for name, values in zip(stages, flags, strict=True) if values}
    return {"input": source, "stages": stages, **given, **rest}


def _add_up(folder: RunFolder, effort: Effort) -> None:
    from muster.farm.rows import rows

    if folder.ledger.exists():
        for _, _, system in rows(folder):
            effort.add(system)
