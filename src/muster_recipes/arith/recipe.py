"""The recipe ``arith`` as ``muster train`` sees it."""

from __future__ import annotations

from muster import TrainRecipe
from muster_recipes.arith.config import DEFAULTS, ArithConfig

RECIPE = TrainRecipe(
    name="arith",
    config=ArithConfig,
    task="muster_recipes.arith.task:ArithTask",
    defaults=DEFAULTS,
)
