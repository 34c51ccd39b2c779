"""The recipe ``ssvae`` as the farm sees it."""

from __future__ import annotations

from muster import Recipe
from muster_recipes.ssvae.config import SsvaeConfig
from muster_recipes.ssvae.figure import draw
from muster_recipes.ssvae.plan import SSVAE, SUPERVISED, count, forecast, plan
from muster_recipes.ssvae.summary import summarise

RECIPE = Recipe(
    name="ssvae",
    config=SsvaeConfig,
    targets={
        SSVAE: "muster_recipes.ssvae.tasks:ssvae_runs",
        SUPERVISED: "muster_recipes.ssvae.tasks:supervised_runs",
    },
    plan=plan,
    count=count,
    forecast=forecast,
    summarise=summarise,
    draw=draw,
    extendable=frozenset(
        {
            "n_labels",
            "alpha_values",
            "corruption_rates",
            "num_seeds",
            "seeds",
            "seed_offset",
            "supervised",
        }
    ),
)
