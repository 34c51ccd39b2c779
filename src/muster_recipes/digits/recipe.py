"""The recipe ``digits`` as ``muster train`` sees it."""

from __future__ import annotations

from muster import TrainRecipe
from muster_recipes.digits.config import DEFAULTS, DigitsConfig

RECIPE = TrainRecipe(
    name="digits",
    config=DigitsConfig,
    task="muster_recipes.digits.task:DigitsTask",
    defaults=DEFAULTS,
)
