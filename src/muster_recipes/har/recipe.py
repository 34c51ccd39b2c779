"""The recipe ``har`` as ``muster train`` sees it."""

from __future__ import annotations

from muster import TrainRecipe
from muster_recipes.har.config import DEFAULTS, HarConfig

RECIPE = TrainRecipe(
    name="har",
    config=HarConfig,
    task="muster_recipes.har.task:HarTask",
    defaults=DEFAULTS,
)
