"""The recipe ``ppo`` as ``muster train`` sees it."""

from __future__ import annotations

from muster import AgentRecipe
from muster_recipes.ppo.config import DEFAULTS, PpoRecipeConfig

AGENT = AgentRecipe(
    name="ppo",
    config=PpoRecipeConfig,
    task="muster_recipes.ppo.task:PpoTask",
    defaults=DEFAULTS,
)
