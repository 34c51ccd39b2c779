"""What decides the shape of a model, and the flags that say it. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from muster import UsageError
from muster_recipes.refusals import require_above_zero, require_one_or_more
from muster_recipes.ssvae.dataset import EMBEDDED, canonical, check_seeds

_TEMPERATURE = 0.66
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
    temperature: float = _TEMPERATURE
    unlabelled: Literal["exact", "sampled"] = "exact"

    def __post_init__(self) -> None:
        sizes = ("num_pixels", "num_classes", "num_style", "num_hidden", "num_samples")
        require_one_or_more(self, *sizes)
        require_above_zero(self, "temperature")


@dataclass(frozen=True, kw_only=True)
class ModelFlags:
    """The data and the model, for a sweep and for a single training."""

    dataset: str = EMBEDDED
    """digits (comes with the package), mnist or fashion-mnist, in any case."""
    data_dir: Path | None = None
    """Folder with the published IDX files; without it the Hugging Face hub is asked."""
    num_style: int = 10
    """Dimensions L of the style z."""
    num_samples: int = 8
    """Styles S drawn per image."""
    temperature: float = _TEMPERATURE
    """Temperature of the Gumbel-softmax; only --unlabelled sampled has one."""
    unlabelled: Literal["exact", "sampled"] = "exact"
    """Sum over the ten classes of an image without a label, or sample one (biased, faster)."""
    label_protocol: Literal["fixed", "per-batch"] = "fixed"
    """A fixed balanced subset, or whole labelled batches (of a rank) and new wrong labels in every
    epoch."""
    split_seed: int = 0
    """Which images are in which split; no other seed changes it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "dataset", canonical(self.dataset))
        require_one_or_more(self, "num_style", "num_samples")
        require_above_zero(self, "temperature")
        if self.unlabelled == "exact" and self.temperature != _TEMPERATURE:
            raise UsageError(
                f"--temperature {self.temperature:g} has no effect with --unlabelled exact.",
                hint="add --unlabelled sampled.",
            )
        check_seeds("--split-seed", self.split_seed)

    @property
    def chosen(self) -> dict[str, Any]:
        """The arguments of ``Hyper`` that the data do not decide."""
        return {name: getattr(self, name) for name in CHOSEN}
