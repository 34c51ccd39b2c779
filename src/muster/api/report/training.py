"""What a report says about a training, of a model or of an agent, and about a `muster run`."""

from __future__ import annotations

import csv
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from muster.api.report.about import gang_failures, gang_state, log_blocks
from muster.api.report.content import Block, Table, Text, facts_of, flat, table_of
from muster.api.report.figures import COUNTERS, draw_confusion, draw_measured, drawn
from muster.api.report.sweep import Content, drawn_curves, pictures_of
from muster.api.runs import Run
from muster.base.codec import read_object
from muster.base.journal import lines_to_draw
from muster.base.shown_text import count
from muster.run.folder import RunFolder
from muster.run.state import last_start, starts_of

Results = Mapping[str, Any]
#: Parts of the results that have a place of their own.
_APART = ("metrics", "agent", "measured", "evaluations", "window", "torch")
_MEASURED, _CONFUSION = "measured", "confusion"


def training_content(run: Run, place: RunFolder) -> Content:
    """Draw what a training recorded into ``place`` and say what is in it."""
    folder, stored = run.folder, run.stored
    state, health = gang_state(folder, run.status())
    results = read_object(folder.training_results)
    lines = lines_to_draw(folder.metrics)
    figures, remarks = drawn(lambda: _draw(folder, place, results, lines))
    pictures = [
        *pictures_of(figures, f"the training {folder.name}"),
        *remarks,
    ]
    if not figures and not remarks:
        pictures = [Text("There are no figures: no step of the training was recorded yet.")]
    train = stored.spec.get("train", {})
    return Content(
        lead=_lead(stored.spec, results, lines),
        state=state,
        health=health,
        failures=gang_failures(folder),
        figures=pictures,
        results=[*_result_blocks(folder, results, lines)],
        settings={
            "Task": {"task": train.get("task"), **train.get("settings", {})},
            "Training": stored.spec.get("config") or train.get("config", {}),
            "How it was run": stored.options,
        },
        effort=[facts_of("Measured by the training", results.get("measured") or {})],
        files=figures,
    )


def script_content(run: Run, place: RunFolder) -> Content:
    """What is known of a program that somebody else wrote: its ranks, starts and ends, what it has
    logged, and the figures that it left.
    """
    folder, stored = run.folder, run.stored
    state, health = gang_state(folder, run.status())
    program = stored.spec["program"]
    starts, table = _starts(folder)
    own = [path for path in sorted(folder.figures.glob("*.png")) if path.stem != "curves"]
    files, pictures = drawn_curves(run, place, "the program has")
    pictures += pictures_of(own, f"the run {folder.name}")
    ranks = f" on {count(starts, 'rank')}" if starts else ""
    return Content(
        lead=f"A run of {program.get('path') or program.get('target')}{ranks}.",
        state=state,
        health=health,
        failures=gang_failures(folder),
        figures=pictures
        or [Text("The program has logged no numbers and left no figures in the run folder.")],
        files=files,
        results=[table, *log_blocks(folder)],
        settings={"What was run": program, "How it was run": stored.options},
    )


# ---------------------------------------------------------------------- pictures


def _draw(
    folder: RunFolder, place: RunFolder, results: Results, lines: Sequence[dict[str, Any]]
) -> list[Path]:
    """The curves, what they leave out, confusions, and what the task itself drew at its end."""
    own = {_MEASURED, *(f"{_CONFUSION}-{split}" for split in results.get("metrics", {}))}
    before = [path for path in sorted(folder.figures.glob("*.*")) if path.stem not in own]
    made = _curves(folder, place, results, lines)
    place.figures.mkdir(exist_ok=True)
    for split, metrics in results.get("metrics", {}).items():
        table = metrics.get("confusion")
        if _is_square(table):
            path = place.figures / f"{_CONFUSION}-{split}"
            title = f"{split}: true and predicted classes"
            made += draw_confusion(table, _class_names(metrics, len(table)), path, title)
    made += draw_measured(lines, place.figures / _MEASURED, _monitor(results, lines))
    if not any(place.figures.iterdir()):
        place.figures.rmdir()
    return [*made, *(path for path in before if path.suffix in (".png", ".pdf", ".svg"))]


def _curves(
    folder: RunFolder, place: RunFolder, results: Results, lines: Sequence[dict[str, Any]]
) -> list[Path]:
    """``curves.png``: the training's own, or one drawn now where the training has not ended."""
    kinds = {line.get("kind") for line in lines}
    if not kinds & {"train", "update"}:
        return []
    if _is_newer(folder.curves, folder.metrics):
        if place.curves != folder.curves:
            shutil.copyfile(folder.curves, place.curves)
        return [place.curves]
    from muster.plotting import draw_curves

    draw_curves(place.curves, lines, _monitor(results, lines), folder.name)
    return [place.curves]


def _is_newer(path: Path, than: Path) -> bool:
    try:
        return path.stat().st_mtime_ns >= than.stat().st_mtime_ns
    except OSError:
        return False


def _monitor(results: Results, lines: Sequence[Mapping[str, Any]]) -> str:
    """The metric that chooses the best model; before a training has ended, its first metric."""
    if "best" in results:
        return str(results["best"]["metric"])
    first = next((line for line in lines if line.get("kind") == "evaluation"), {})
    return next((n for n in first if n not in (*COUNTERS, "loss")), "loss")


# ---------------------------------------------------------------------- tables


def _result_blocks(
    folder: RunFolder, results: Results, lines: Sequence[Mapping[str, Any]]
) -> Iterator[Block | None]:
    yield from result_tables(folder, results)
    evaluations = [line for line in lines if line.get("kind") == "evaluation"]
    shown = [{n: v for n, v in line.items() if n != "kind"} for line in evaluations]
    yield table_of("Evaluations", shown, whole=folder.metrics)
    if not results:
        steps = [line for line in lines if line.get("kind") in ("train", "update")]
        for last in steps[-1:]:
            known = {name: value for name, value in last.items() if name != "kind"}
            yield facts_of("The last recorded step", known)


def result_tables(folder: RunFolder, results: Results) -> Iterator[Block | None]:
    """What a training came to: metrics by split and by class, what an agent's task said, facts."""
    metrics: Mapping[str, Mapping[str, Any]] = results.get("metrics", {})
    rows = [{"split": split, **_scalars(found)} for split, found in metrics.items()]
    yield table_of("Final metrics by split", rows)
    yield from _by_class(metrics)
    yield from _compared(folder, results.get("agent") or {})
    yield facts_of("The training", {k: v for k, v in results.items() if k not in _APART})


def _by_class(metrics: Mapping[str, Mapping[str, Any]]) -> Iterator[Block | None]:
    """A table for each metric that has a value per class: classes below, splits to the right."""
    names = dict.fromkeys(name for found in metrics.values() for name in found)
    for name in names:
        columns = {split: _per_class(found.get(name)) for split, found in metrics.items()}
        classes = dict.fromkeys(label for column in columns.values() for label in column)
        rows = [
            {"class": label, **{split: column.get(label) for split, column in columns.items()}}
            for label in classes
        ]
        yield table_of(name.replace("_", " ").capitalize(), rows)


def _compared(folder: RunFolder, told: Mapping[str, Any]) -> Iterator[Block | None]:
    """What an agent's task said at its end: its own CSV files, else what it returned."""
    files = sorted(folder.figures.glob("*.csv"))
    for path in files:
        yield from _csv_blocks(path)
    if files:
        return
    groups = {name: dict(flat("", v)) for name, v in told.items() if isinstance(v, Mapping)}
    rows = [{"": name, **_scalars(values)} for name, values in groups.items()]
    yield table_of("The agent at its end", rows)
    yield facts_of("The agent", {k: v for k, v in told.items() if k not in groups})


def _csv_blocks(path: Path) -> Iterator[Block | None]:
    """The table in a CSV file, and the remarks in its lines that begin with #."""
    text = path.read_text(encoding="utf-8", errors="replace").splitlines()
    remarks = [line.lstrip("# ") for line in text if line.startswith("#")]
    rows = csv.DictReader(line for line in text if not line.startswith("#"))
    cells = [{name: _value(cell) for name, cell in row.items() if name} for row in rows]
    yield table_of(path.stem.replace("_", " ").capitalize(), cells, whole=path)
    for remark in remarks:
        yield Text(remark)


def _starts(folder: RunFolder) -> tuple[int, Table | None]:
    """How many ranks the last start had on node 0, and a row per start."""
    starts = [one for one in starts_of(folder) if one.begin]
    rows = [
        {
            "start": one.begin["time"],
            "node": one.node,
            "ranks": len(one.begin.get("ranks", [])),
            "devices": ", ".join(one.begin.get("ranks", [])),
            "end": one.end.get("time"),
            "exit code": one.end.get("exit_code"),
            "restarts": one.end.get("restarts", 0) if one.end else None,
            "stopped by": one.end.get("stopped_by"),
            "stall": one.end.get("stall"),
        }
        for one in starts
    ]
    num_ranks = len(last_start(folder).begin.get("ranks", []))
    return num_ranks, table_of("Starts", rows, whole=folder.events)


# ---------------------------------------------------------------------- values


def _lead(spec: Mapping[str, Any], results: Results, lines: Sequence[Mapping[str, Any]]) -> str:
    name = spec.get("recipe") or spec.get("train", {}).get("task")
    is_agent = "episodes" in results or any(line.get("kind") == "update" for line in lines)
    what = "A training of an agent" if is_agent else "A training"
    if not results:
        return f"{what}: {name}."
    ranks = count(results["num_ranks"], "rank")
    strategy = f", strategy {results['strategy']}" if "strategy" in results else ""
    return (
        f"{what}: {name}, {count(results['parameters'], 'parameter')}, on {ranks} "
        f"({results['device']}{strategy}); ended because of: {results['ended_because']}."
    )


def _scalars(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if _is_scalar(value)}


def _is_scalar(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float)


def _per_class(value: Any) -> dict[str, Any]:
    if isinstance(value, list):
        value = {str(number): item for number, item in enumerate(value)}
    if isinstance(value, Mapping) and all(_is_scalar(item) for item in value.values()):
        return dict(value)
    return {}


def _is_square(table: Any) -> bool:
    return (
        isinstance(table, list)
        and len(table) > 1
        and all(isinstance(row, list) and len(row) == len(table) for row in table)
    )


def _class_names(metrics: Mapping[str, Any], size: int) -> list[str]:
    """The keys of a metric that has a value per class, else numbers."""
    for value in metrics.values():
        if isinstance(value, Mapping) and len(value) == size:
            return [str(name) for name in value]
    return [str(number) for number in range(size)]


def _value(cell: str | None) -> Any:
    if not cell:
        return None
    for kind in (int, float):
        with suppress(ValueError):
            return kind(cell)
    return cell
