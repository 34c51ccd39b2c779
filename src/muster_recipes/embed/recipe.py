"""The recipe ``embed`` as ``muster map`` sees it, and its flags. No torch here."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from muster import MapRecipe, UsageError
from muster_recipes.embed.stage import Embed
from muster_recipes.refusals import require_default


@dataclass(frozen=True, kw_only=True)
class EmbedConfig:
    """Adds the column ``embedding`` to each record: one vector of float32 per text."""

    model: str = ""
    """A Hugging Face encoder: a name or a folder."""
    function: str = ""
    """Instead of a model: FILE.py:FUNCTION or MODULE:FUNCTION, a list of texts to an array."""
    column: str = "text"
    """Column with the text."""
    pooling: Literal["mean", "cls", "last"] = "mean"
    """A text's vector is the mean of its tokens' vectors, the first one, or the last one."""
    normalize: bool = False
    """Make vectors of length 1."""
    batch_size: int = 128
    """Texts per batch at the start."""
    max_length: int = 0
    """Tokens of a text that are read; 0: as many as the model takes."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of the weights; vectors are float32 always."""

    def check(self) -> None:
        """Raise UsageError for values that make no sense."""
        if bool(self.model) == bool(self.function):
            raise UsageError(
                "embed needs either --model or --function"
                + (f", and has {self.model} and {self.function}." if self.model else "."),
                hint="--model sentence-transformers/all-MiniLM-L6-v2, or "
                "--function FILE.py:FUNCTION.",
            )
        if self.batch_size < 1:
            raise UsageError(f"--batch-size {self.batch_size} is below 1.")
        if self.max_length < 0:
            raise UsageError(f"--max-length {self.max_length} is below 0.")
        if not self.column:
            raise UsageError("--column is empty.", hint="name the column with the text.")
        if self.function:
            only = ("pooling", "max_length", "dtype")
            require_default(self, only, "with --function", hint="leave it out, or use --model.")

    @property
    def absolute_function(self) -> str:
        """The function as workers find it, whatever folder they run in."""
        location, _, name = self.function.rpartition(":")
        if location.endswith(".py"):
            return f"{os.path.abspath(location)}:{name}"
        return self.function


def stages(config: EmbedConfig) -> list[Embed]:
    """The stages of a run, as dataclass instances. Raises UsageError for settings without sense."""
    config.check()
    return [Embed(**{**vars(config), "function": config.absolute_function})]


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
