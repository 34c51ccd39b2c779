"""Training recipes by name: a table of "module:attribute", imported on use."""

from __future__ import annotations

import importlib

from muster.api.recipe import TrainRecipe

TASKS: dict[str, str] = {
    "arith": "muster_recipes.arith.recipe:RECIPE",
    "digits": "muster_recipes.digits.recipe:RECIPE",
    "har": "muster_recipes.har.recipe:RECIPE",
}


def load_train_recipe(name: str) -> TrainRecipe:
    """The recipe called ``name``, which must be in the table."""
    module, _, attribute = TASKS[name].partition(":")
    recipe = getattr(importlib.import_module(module), attribute)
    assert isinstance(recipe, TrainRecipe)
    return recipe
