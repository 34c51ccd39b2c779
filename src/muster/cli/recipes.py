"""Recipes by name: a table of "module:attribute", imported on use."""

from __future__ import annotations

import importlib

from muster.api.recipe import Recipe

RECIPES: dict[str, str] = {
    "ssm": "muster_recipes.ssm.recipe:RECIPE",
    "ssvae": "muster_recipes.ssvae.recipe:RECIPE",
}


def load_recipe(name: str) -> Recipe:
    """The recipe called ``name``, which must be in the table."""
    module, _, attribute = RECIPES[name].partition(":")
    recipe = getattr(importlib.import_module(module), attribute)
    assert isinstance(recipe, Recipe)
    return recipe
