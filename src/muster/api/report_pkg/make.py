"""A recipe's own table and figures, made from the exported rows of a run."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from muster.api.recipe import Recipe
from muster.api.runs import Run
from muster.base.atomic_files import replacing
from muster.base.records import write_json


def make_report(run: Run, recipe: Recipe, config: Any) -> list[Path]:
    """Write ``table.csv``, ``table.json`` and the figures; returns their paths.

    Works on an unfinished run as well: cells without a result are empty, never 0.
    """
    table = recipe.summarise(config, _rows(run))
    folder = run.folder
    names = list(dict.fromkeys(name for row in table for name in row))
    with replacing(folder.table_csv) as beside, beside.open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(table)
    write_json(folder.table_csv.with_suffix(".json"), table)
    folder.figures.mkdir(exist_ok=True)
    return [folder.table_csv, *recipe.draw(config, table, folder.figures)]


def _rows(run: Run) -> Iterator[dict[str, Any]]:
    """Parameters, metrics and state of every task in one flat dict."""
    from muster.farm.export import rows

    for params, metrics, system in rows(run.folder):
        yield {**params, **metrics, **system}
