"""The recipe ``clstm-ppo`` as ``muster train`` sees it."""

from __future__ import annotations

from muster import AgentRecipe
from muster_recipes.clstm_ppo.config import DEFAULTS, ClstmPpoConfig

AGENT = AgentRecipe(
    name="clstm-ppo",
    config=ClstmPpoConfig,
    task="muster_recipes.clstm_ppo.task:ClstmPpoTask",
    defaults=DEFAULTS,
)
