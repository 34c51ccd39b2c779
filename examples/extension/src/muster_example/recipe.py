"""A recipe: ``muster sweep squares``. This module imports nothing heavy."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import muster


def area(ctx: muster.Context, width: int) -> dict[str, float]:
    for step in range(3):
        ctx.log(step, width=width * (step + 1) / 3)
    return {"area": float(width * width)}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Squares of several widths."""

    widths: tuple[int, ...] = (1, 2)
    """Sides of the squares."""


def plan(config: Config) -> Iterator[muster.RecipeTask]:
    for width in config.widths:
        yield muster.RecipeTask("area", {"width": width})


def summarise(config: Config, rows: Any) -> list[dict[str, Any]]:
    return [{"width": row["width"], "area": row["area"]} for row in rows if row["state"] == "done"]


def draw(config: Config, table: list[Mapping[str, Any]], folder: Path) -> list[Path]:
    return []


SQUARES = muster.Recipe(
    name="squares",
    config=Config,
    targets={"area": "muster_example.recipe:area"},
    plan=plan,
    count=lambda config: len(config.widths),
    summarise=summarise,
    draw=draw,
    extendable=frozenset({"widths"}),
)
