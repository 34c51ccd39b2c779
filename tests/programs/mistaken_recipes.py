"""Recipes whose own words about their results are wrong until there is a file ``mended``.

All tasks but the first wait until the results of the first have been looked at.
"""

import time
from dataclasses import dataclass
from pathlib import Path

import muster

LOOKED = Path("looked").absolute()


def wait_unless(is_first):
    end = time.monotonic() + 300
    while not is_first and not LOOKED.exists() and time.monotonic() < end:
        time.sleep(0.02)


@dataclass(frozen=True, kw_only=True)
class Config:
    """A few tasks."""

    num: int = 4


def task(x: int):
    wait_unless(x == 0)
    return {"y": x}


def stage(record):
    wait_unless(record["x"] == 0)
    return record


def summarise(config, rows):
    LOOKED.touch()
    column = "y" if Path("mended").exists() else "yy"
    return [{"y": row[column]} for row in rows]


def count(config, records):
    return {"sum": summarise(config, records)[0]["y"]}


def draw(config, table, folder):
    (folder / "figure.txt").write_text(str(len(list(table))))
    return [folder / "figure.txt"]


SWEEP = muster.Recipe(
    name="mistaken",
    config=Config,
    targets={"task": "mistaken_recipes.py:task"},
    plan=lambda config: (muster.RecipeTask("task", {"x": x}) for x in range(config.num)),
    count=lambda config: config.num,
    summarise=summarise,
    draw=draw,
)
MAP = muster.MapRecipe(
    name="mistaken",
    config=Config,
    stages=lambda config: [stage],
    source=lambda config: [{"x": x, "y": x} for x in range(config.num)],
    summarise=count,
    draw=draw,
    output="out.jsonl",
)
