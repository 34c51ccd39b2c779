"""Training recipes by name: tables of "module:attribute", imported on use."""

from __future__ import annotations

import importlib

from muster.api.recipe import AgentRecipe, TrainRecipe

TASKS: dict[str, str] = {
    "arith": "muster_recipes.arith.recipe:RECIPE",
    "digits": "muster_recipes.digits.recipe:RECIPE",
    "har": "muster_recipes.har.recipe:RECIPE",
    "ssvae": "muster_recipes.ssvae.train_recipe:RECIPE",
}
#: What learns by acting.
AGENTS: dict[str, str] = {
    "clstm-ppo": "muster_recipes.clstm_ppo.recipe:AGENT",
    "ppo": "muster_recipes.ppo.recipe:AGENT",
}


def load_train_recipe(name: str) -> TrainRecipe:
    """The recipe called ``name``, which must be in the table of tasks."""
    recipe = _load(TASKS[name])
    assert isinstance(recipe, TrainRecipe)
    return recipe


def load_agent_recipe(name: str) -> AgentRecipe:
    """The recipe called ``name``, which must be in the table of agents."""
    recipe = _load(AGENTS[name])
    assert isinstance(recipe, AgentRecipe)
    return recipe


def _load(place: str) -> object:
    module, _, attribute = place.partition(":")
    return getattr(importlib.import_module(module), attribute)
