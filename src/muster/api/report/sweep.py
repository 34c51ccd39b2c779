"""What a report says about a sweep: of a recipe with its own table and figures, of anything else
with means over the seeds.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from muster.api.recipe import Recipe
from muster.api.report.about import Effort, failure_blocks, farm_state
from muster.api.report.content import (
    MOST_ROWS,
    Block,
    Health,
    Picture,
    Table,
    Text,
    as_given,
    facts_of,
    table_of,
)
from muster.api.report.figures import draw_curves, draw_groups, drawn, why_no_picture
from muster.api.report.groups import SEED, Groups, best_first, grouped, shown_rows, whole_rows
from muster.api.report.search import search_blocks, search_lead
from muster.api.runs import Run
from muster.api.sweeps.adding import shown_additions
from muster.api.sweeps.search_state import SearchState, read_search
from muster.api.trackers.metrics import Series
from muster.base.atomic_files import replacing
from muster.base.codec import write_json
from muster.base.shown_text import HIDDEN, count, is_secret_name
from muster.farm.canonical import csv_cell, escape_surrogates
from muster.farm.ledger.read import LedgerReader
from muster.run.folder import RunFolder

_MOST_CURVES = 50


class Content(NamedTuple):
    """What differs between kinds of runs; ``files``: what was made beside the page.

    ``settings`` are named values by caption; ``effort``: what is known of time and memory.
    """

    lead: str
    state: str
    health: Health
    failures: Sequence[Block | None] = ()
    figures: Sequence[Block | None] = ()
    results: Sequence[Block | None] = ()
    settings: Mapping[str, Mapping[str, Any]] = {}
    effort: Sequence[Block | None] = ()
    files: Sequence[Path] = ()


class SweepMaker(NamedTuple):
    """The recipe that a sweep was made from, with the config of this run."""

    recipe: Recipe
    config: Any


def sweep_content(run: Run, maker: SweepMaker | None, place: RunFolder) -> Content:
    """Write the table and the figures of a sweep into ``place`` and say what is in them."""
    stored, status = run.stored, run.status()
    state, health = farm_state(status)
    effort = Effort()
    search = read_search(run.folder) if maker is None else None
    paths: list[Path] = []
    curves: list[Block] = []
    if search is not None:
        figures, results, files = _of_search(run, search, place, effort)
    else:
        made = _of_recipe if maker is not None else _of_groups
        figures, results, files = made(run, maker, place, effort)
        paths, curves = _curves(run, place)
    failures = run.failures() if run.folder.ledger.exists() else []
    added = shown_additions(run.folder)
    lead = _lead(stored.spec, status.total, is_whole=not added)
    return Content(
        lead=lead if search is None else search_lead(search, stored.targets[0]["name"]),
        state=state,
        health=health,
        failures=failure_blocks(failures),
        figures=[*figures, *curves],
        results=results,
        settings={
            "What was run": {**_what(stored.spec), **added},
            "How it was run": stored.options,
        },
        effort=[effort.table()],
        files=[*files, *paths],
    )


def write_table(place: RunFolder, rows: list[dict[str, Any]]) -> list[Path]:
    """``table.csv`` and ``table.json``, each as a whole or not at all; cells may be empty."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    with (
        replacing(place.table_csv) as beside,
        beside.open("w", newline="", encoding="utf-8") as file,
    ):
        writer = csv.writer(file)
        writer.writerow(map(_cell, names))
        writer.writerows([_cell(row.get(name)) for name in names] for row in rows)
    write_json(place.table_csv.with_suffix(".json"), rows)
    return [place.table_csv]


def _cell(value: Any) -> Any:
    return csv_cell(escape_surrogates(value)) if isinstance(value, str) else value


def pictures_of(paths: Iterable[Path], about: str, alt: str = "") -> list[Block]:
    """The PNGs among ``paths`` as pictures; their captions name all files of that name."""
    paths = list(paths)
    blocks: list[Block] = []
    for path in paths:
        if path.suffix.lower() == ".png":
            same = [other.name for other in paths if other.stem == path.stem]
            words = path.stem.replace("_", " ").replace("-", " ")
            blocks.append(Picture(path, alt or f"Figure {words} of {about}", ", ".join(same)))
    return blocks


Made = tuple[Sequence[Block | None], Sequence[Block | None], list[Path]]


def _of_recipe(run: Run, maker: SweepMaker | None, place: RunFolder, effort: Effort) -> Made:
    assert maker is not None
    recipe, config = maker
    table = recipe.summarise(config, _flat_rows(run.folder, effort))
    files = write_table(place, table)
    place.figures.mkdir(exist_ok=True)
    figures, remarks = drawn(lambda: recipe.draw(config, table, place.figures))
    shown = table_of(f"Results of {recipe.name}", table, whole=place.table_csv)
    pictures = pictures_of(figures, f"the recipe {recipe.name}")
    return [*pictures, *remarks], [shown], [*files, *figures]


def _of_groups(
    run: Run, maker: SweepMaker | None, place: RunFolder, effort: Effort, *, draws: bool = True
) -> Made:
    found = grouped(_tasks(run.folder, effort))
    if not found.groups:
        return [], [], []
    files = write_table(place, whole_rows(found))
    caption = "Mean ± standard deviation over the seeds" if found.is_repeated else "Results"
    best, which = found, ""
    if len(found.groups) > MOST_ROWS and found.metrics:
        best, which = best_first(found)
    shown = table_of(caption, shown_rows(best), whole=place.table_csv, which=which)
    if shown is not None and not found.metrics and not found.varying:
        shown = None
    facts = facts_of("Parameters with one value", found.fixed, are_given=True)
    notes = [Text(sentence) for sentence in _remarks(found, shown)]
    figures, pictures = _picture(run, found, place) if draws else ([], [])
    return pictures, [shown, *notes, facts], [*files, *figures]


def _of_search(run: Run, state: SearchState, place: RunFolder, effort: Effort) -> Made:
    figures, tables, drawings = search_blocks(run, state, place)
    _, results, files = _of_groups(run, None, place, effort, draws=False)
    return figures, [*tables, *results], [*files, *drawings]


def _picture(run: Run, found: Groups, place: RunFolder) -> tuple[list[Path], list[Block]]:
    reason = why_no_picture(found)
    if reason is not None:
        return [], [Text(f"There is no figure: {reason}.")]
    place.figures.mkdir(exist_ok=True)
    bars = "mean, bars: standard deviation over the seeds" if found.is_repeated else "one run each"
    title = f"{run.folder.name}: {bars}"
    paths, remarks = drawn(lambda: draw_groups(found, place.figures / "results", title))
    what, over = ", ".join(found.metrics), " and ".join(found.varying)
    return paths, [*pictures_of(paths, "the sweep", f"{what} over {over}; {bars}"), *remarks]


def drawn_curves(
    run: Run, place: RunFolder, who: str, which: str = ""
) -> tuple[list[Path], list[Block]]:
    """What ``who`` have logged over time: a picture of at most ``_MOST_CURVES`` of each metric."""
    chosen = curves_to_show(run.series)
    if not chosen:
        return [], []
    place.figures.mkdir(exist_ok=True)
    title = f"{run.folder.name}: what {who} logged{which}"
    paths, remarks = drawn(lambda: draw_curves(chosen, place.figures / "curves", title))
    alt = f"{', '.join(chosen)} over steps{which}"
    return paths, [*pictures_of(paths, "the run", alt), *remarks]


def _curves(run: Run, place: RunFolder) -> tuple[list[Path], list[Block]]:
    if not run.folder.ledger.exists():
        return [], []
    with LedgerReader(run.folder.ledger) as ledger:
        has_more = len(ledger.tasks_with_metrics()) > _MOST_CURVES
    which = f", the {_MOST_CURVES} that end lowest and highest" if has_more else ""
    return drawn_curves(run, place, "tasks have", f", a line per task{which}")


def curves_to_show(
    series: Callable[[], Iterable[Series]], most: int = _MOST_CURVES
) -> dict[str, list[Series]]:
    """The series by metric; of more than ``most`` those whose last value is lowest or highest.

    ``series`` is asked twice, so that not all points of a large sweep are held at once.
    """
    ends: dict[str, list[tuple[float, str]]] = {}
    for one in series():
        last = float(one.curve.value[-1])
        ends.setdefault(one.name, []).append((math.inf if math.isnan(last) else last, one.task))
    kept = {}
    for name, found in ends.items():
        ordered = sorted(found)
        cut = ordered if len(ordered) <= most else [*ordered[: most // 2], *ordered[-most // 2 :]]
        kept[name] = {task for _, task in cut}
    chosen: dict[str, list[Series]] = {name: [] for name in kept}
    for one in series():
        if one.task in kept.get(one.name, ()):
            chosen[one.name].append(one)
    return chosen


def _remarks(found: Groups, shown: Table | None) -> Iterator[str]:
    if found.num_unusable:
        yield (
            "The means leave out what is infinite or not a number: "
            f"{count(found.num_unusable, 'result')}."
        )
    if found.others:
        yield f"Results that are not numbers are in results.csv only: {', '.join(found.others)}."
    if shown is not None and len(found.groups) > MOST_ROWS:
        yield "Every single task is in results.csv and results.parquet."


def _what(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe or target, and then its config or its space."""
    inner = {
        name: value for part in ("config", "space") for name, value in spec.get(part, {}).items()
    }
    return {**{k: v for k, v in spec.items() if k not in ("config", "space")}, **inner}


def _lead(spec: Mapping[str, Any], total: int, *, is_whole: bool) -> str:
    """``is_whole``: nothing was added to what the run was begun with."""
    tasks = count(total, "task")
    if "recipe" in spec:
        return f"A sweep of the recipe {spec['recipe']}: {tasks}."
    space = spec.get("space", {})
    seeds = f", seeds {as_given(space['seeds'])}" if space.get("seeds") and is_whole else ""
    return f"A sweep of {spec.get('target', 'a function')}: {tasks}{seeds}."


def _flat_rows(folder: RunFolder, effort: Effort) -> Iterator[dict[str, Any]]:
    """Parameters, metrics and state of every task in one flat dict."""
    for params, metrics, system in _rows(folder, effort):
        yield {**params, **metrics, **system}


def _tasks(
    folder: RunFolder, effort: Effort
) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any], bool]]:
    hidden: dict[tuple[str, str], str] = {}
    for params, metrics, system in _rows(folder, effort):
        for name in filter(is_secret_name, params):  # told apart, so that groups stay groups
            which = (name, str(params[name]))
            params[name] = hidden.setdefault(which, f"{HIDDEN} ({len(hidden) + 1})")
        yield params, metrics, system["state"] == "done"


def _rows(folder: RunFolder, effort: Effort) -> Iterator[tuple[dict[str, Any], ...]]:
    """Parameters, metrics and muster's own columns of every task there is so far."""
    from muster.farm.rows import rows

    if not folder.ledger.exists():  # killed before there was a task
        return
    for row in rows(folder):
        effort.add(row[2])
        yield row


__all__ = ["SEED", "Content", "SweepMaker", "pictures_of", "sweep_content", "write_table"]
