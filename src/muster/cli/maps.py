"""Pipelines by name for ``muster map``: a table of "module:attribute", imported on use."""

from __future__ import annotations

import importlib

from muster.api.recipe import MapRecipe

MAPS: dict[str, str] = {
    "embed": "muster_recipes.embed.recipe:RECIPE",
    "reasoning": "muster_recipes.reasoning.recipe:RECIPE",
}


def load_map_recipe(name: str) -> MapRecipe:
    """The recipe called ``name``, which must be in the table."""
    module, _, attribute = MAPS[name].partition(":")
    recipe = getattr(importlib.import_module(module), attribute)
    assert isinstance(recipe, MapRecipe)
    return recipe
