"""What decides the shape of a model: runs of equal ``Hyper`` can be trained as one. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from muster import UsageError


@dataclass(frozen=True, kw_only=True)
class Hyper:
    """Sizes and estimator of one model.

    ``num_samples``: styles drawn per image (and class). ``unlabelled``: how the class of an image
    without a label is treated; see ``objective``. ``temperature``: of the Gumbel-softmax, used by
    "sampled" only.
    """

    num_pixels: int
    num_classes: int = 10
    num_style: int = 10
    num_hidden: int = 256
    num_samples: int = 8
    temperature: float = 0.66
    unlabelled: Literal["exact", "sampled"] = "exact"

    def __post_init__(self) -> None:
        for name in ("num_pixels", "num_classes", "num_style", "num_hidden", "num_samples"):
            if getattr(self, name) < 1:
                flag = name.replace("_", "-")
                raise UsageError(f"--{flag} must be 1 or more, not {getattr(self, name)}.")
        if not self.temperature > 0:
            raise UsageError(f"--temperature must be above 0, not {self.temperature}.")
