"""The flags of ``muster train ssvae`` and how it is trained. No torch here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from muster import TrainRecipe, UsageError
from muster_recipes.refusals import require_one_or_more
from muster_recipes.ssvae.dataset import (
    EMBEDDED,
    canonical,
    check_labels,
    check_seeds,
    check_source,
)
from muster_recipes.ssvae.hyper import TEMPERATURE, check_model

_LABEL_SEED = 42


@dataclass(frozen=True, kw_only=True)
class SsvaeTrainConfig:
    """One semi-supervised VAE (model M2) on all devices."""

    # The digest that names a run's folder goes by the order of these fields.
    dataset: str = EMBEDDED
    """digits (comes with the package), mnist or fashion-mnist, in any case."""
    data_dir: Path | None = None
    """Folder with the published IDX files; without it the Hugging Face hub is asked."""
    n_labels: int = 100
    """Number M of labelled images."""
    alpha: float = 50.0
    """Weight of log q(y|x) of a labelled image."""
    corruption_rate: float = 0.0
    """Share of wrong labels."""
    num_style: int = 10
    """Dimensions L of the style z."""
    num_samples: int = 8
    """Styles S drawn per image."""
    unlabelled: Literal["exact", "sampled"] = "exact"
    """Sum over the ten classes of an image without a label, or sample one (biased, faster)."""
    temperature: float = TEMPERATURE
    """Temperature of the Gumbel-softmax; only --unlabelled sampled has one."""
    label_protocol: Literal["fixed", "per-batch"] = "fixed"
    """A fixed balanced subset, or whole labelled batches (of a rank) and new wrong labels in every
    epoch."""
    label_seed: int = _LABEL_SEED
    """Which images are labelled, and which labels are wrong; --seed does not change it."""
    split_seed: int = 0
    """Which images are in which split; --seed does not change it."""
    report: Literal["last", "best"] = "last"
    """The metrics at the end are of the last model, or of the best by validation accuracy."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "dataset", canonical(self.dataset))
        check_model(self)
        require_one_or_more(self, "n_labels")
        if not 0 <= self.alpha < math.inf:
            raise UsageError(f"--alpha {self.alpha:g} must be 0 or above, and finite.")
        if not 0 <= self.corruption_rate <= 1:
            raise UsageError(
                f"--corruption-rate {self.corruption_rate:g} is not a share from 0 to 1.",
                hint="write 0.2 for a fifth of the labels.",
            )
        if self.label_protocol == "per-batch" and self.label_seed != _LABEL_SEED:
            raise UsageError(
                f"--label-seed {self.label_seed} has no effect with --label-protocol per-batch.",
                hint="--seed draws the labels there.",
            )
        check_seeds("--label-seed", self.label_seed)
        source = check_source(self.dataset, self.data_dir)
        check_labels(self.n_labels, source, self.dataset)
        if self.data_dir is not None:  # the ranks may start in another folder
            object.__setattr__(self, "data_dir", self.data_dir.resolve())


RECIPE = TrainRecipe(
    name="ssvae",
    config=SsvaeTrainConfig,
    task="muster_recipes.ssvae.task:SsvaeTask",
    # AdamW without weight decay is Adam. 32 bits: the objective is a sum over pixels and samples.
    defaults={
        "epochs": 75,
        "global_batch": 128,
        "lr": 1e-3,
        "schedule": "constant",
        "weight_decay": 0.0,
        "eval_frequency": 5,
        "precision": "fp32",
        "seed": 42,
    },
)
