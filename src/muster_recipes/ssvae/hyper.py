"""The sizes and the estimator of a model. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from muster import UsageError
from muster_recipes.refusals import require_above_zero, require_one_or_more
from muster_recipes.ssvae.dataset import check_seeds

TEMPERATURE = 0.66
#: Fields of ``Hyper`` that are flags, or parameters of a task.
CHOSEN = ("num_style", "num_samples", "temperature", "unlabelled")


@dataclass(frozen=True, kw_only=True)
class Hyper:
    """Sizes and estimator of one model; runs of equal ``Hyper`` can be trained as one.

    ``num_samples``: styles drawn per image (and class). ``unlabelled``: how the class of an image
    without a label is treated; see ``objective``. ``temperature``: of the Gumbel-softmax, used by
    "sampled" only.
    """

    num_pixels: int
    num_classes: int = 10
    num_style: int = 10
    num_hidden: int = 256
    num_samples: int = 8
    temperature: float = TEMPERATURE
    unlabelled: Literal["exact", "sampled"] = "exact"

    def __post_init__(self) -> None:
        sizes = ("num_pixels", "num_classes", "num_style", "num_hidden", "num_samples")
        require_one_or_more(self, *sizes)
        require_above_zero(self, "temperature")


def check_model(config: Any) -> None:
    """Refuse settings, of a sweep or of a training, from which no model can be made."""
    require_one_or_more(config, "num_style", "num_samples")
    require_above_zero(config, "temperature")
    if config.unlabelled == "exact" and config.temperature != TEMPERATURE:
        raise UsageError(
            f"--temperature {config.temperature:g} has no effect with --unlabelled exact.",
            hint="add --unlabelled sampled.",
        )
    check_seeds("--split-seed", config.split_seed)
