"""Recipes of a user's own: one of each kind that needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

import muster


def area(width: int, seed: int) -> dict[str, float]:
    return {"area": float(width * width + seed)}


@dataclass(frozen=True, kw_only=True)
class SquaresConfig:
    """Squares of several widths."""

    widths: tuple[int, ...] = (1, 2)
    """Sides of the squares."""
    num_seeds: int = 1
    """Seeds 0 … n-1."""


def plan(config):
    for width in config.widths:
        for seed in range(config.num_seeds):
            yield muster.RecipeTask("area", {"width": width, "seed": seed})


def summarise(config, rows):
    table = {}
    for row in rows:
        table.setdefault(row["width"], []).append(row["area"])
    return [{"width": width, "mean": sum(a) / len(a)} for width, a in sorted(table.items())]


def draw(config, table, folder):
    path = folder / "squares.txt"
    path.write_text("\n".join(f"{row['width']} {row['mean']}" for row in table))
    return [path]


SQUARES = muster.Recipe(
    name="squares",
    config=SquaresConfig,
    targets={"area": "own_recipes.py:area"},
    plan=plan,
    count=lambda config: len(config.widths) * config.num_seeds,
    summarise=summarise,
    draw=draw,
    extendable=frozenset({"num_seeds"}),
)


def shout(record):
    return {**record, "text": record["text"].upper() + "!"}


@dataclass(frozen=True, kw_only=True)
class ShoutConfig:
    """Texts in capitals."""

    words: tuple[str, ...] = ("one", "two")
    """What to shout."""


SHOUT = muster.MapRecipe(
    name="shout",
    config=ShoutConfig,
    stages=lambda config: [shout],
    source=lambda config: [{"text": word} for word in config.words],
    summarise=lambda config, records: {"letters": sum(len(each["text"]) for each in records)},
    output="shouted.jsonl",
)
