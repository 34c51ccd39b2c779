"""The recipe ``ssm`` as the farm sees it."""

from __future__ import annotations

from muster import Recipe
from muster_recipes.ssm.config import SsmConfig
from muster_recipes.ssm.figure import draw
from muster_recipes.ssm.plan import count, forecast, plan
from muster_recipes.ssm.summary import summarise

RECIPE = Recipe(
    name="ssm",
    config=SsmConfig,
    targets={
        "gnc": "muster_recipes.ssm.tasks:gnc_block",
        "gd": "muster_recipes.ssm.tasks:gd_cells",
    },
    plan=plan,
    count=count,
    forecast=forecast,
    summarise=summarise,
    draw=draw,
    extendable=frozenset(
        {
            "num_seeds",
            "seeds",
            "seed_offset",
            "teacher_ranks",
            "student_dims",
            "gnc",
            "gnc_num_samples",
            "gd",
        }
    ),
)
