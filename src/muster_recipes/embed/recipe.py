"""The recipe ``embed`` as ``muster map`` sees it."""

from __future__ import annotations

import dataclasses

from muster import MapRecipe
from muster_recipes.embed.config import EmbedConfig
from muster_recipes.embed.stage import Embed


def stages(config: EmbedConfig) -> list[Embed]:
    """The stages of a run, as dataclass instances. Raises UsageError for settings without sense."""
    config.check()
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return [Embed(**{**values, "function": config.absolute_function})]


def source(config: EmbedConfig) -> None:
    """None: the recipe has no data set of its own, so ``--input`` says what to read."""
    return


RECIPE = MapRecipe(
    name="embed",
    config=EmbedConfig,
    stages=stages,
    source=source,
    output="embeddings.parquet",
)
