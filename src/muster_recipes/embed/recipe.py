"""The recipe ``embed`` as ``muster map`` sees it."""

from __future__ import annotations

from muster import MapRecipe
from muster_recipes.embed.config import EmbedConfig
from muster_recipes.embed.stage import Embed


def stages(config: EmbedConfig) -> list[Embed]:
    """The stages of a run, as dataclass instances; UsageError for a config that cannot be meant."""
    config.check()
    return [
        Embed(
            model=config.model,
            function=config.absolute_function if config.function else "",
            column=config.column,
            pooling=config.pooling,
            normalize=config.normalize,
            batch_size=config.batch_size,
            max_length=config.max_length,
            dtype=config.dtype,
        )
    ]


def source(config: EmbedConfig) -> None:
    """There is no data set of its own: ``--input`` says what to read."""
    return


RECIPE = MapRecipe(
    name="embed",
    config=EmbedConfig,
    stages=stages,
    source=source,
    output="embeddings.parquet",
)
