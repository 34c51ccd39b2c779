"""The recipe ``ssvae`` as ``muster train`` sees it."""

from __future__ import annotations

from muster import TrainRecipe
from muster_recipes.ssvae.train_config import DEFAULTS, SsvaeTrainConfig

RECIPE = TrainRecipe(
    name="ssvae",
    config=SsvaeTrainConfig,
    task="muster_recipes.ssvae.task:SsvaeTask",
    defaults=DEFAULTS,
)
