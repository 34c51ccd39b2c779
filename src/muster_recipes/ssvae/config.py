"""The flags of ``muster sweep ssvae`` and of ``muster train ssvae``, and how that is trained.

Light: the coordinator imports this, torch stays out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from muster import TrainRecipe, UsageError
from muster_recipes.refusals import (
    require_above_zero,
    require_default,
    require_different_counts,
    require_one_or_more,
    require_seeds,
)
from muster_recipes.ssvae.dataset import EMBEDDED, canonical, check_labels, check_source

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


def check_model(config: Any) -> None:
    """Refuse settings, of a sweep or of a training, from which no model can be made."""
    require_one_or_more(config, "num_style", "num_samples")
    require_above_zero(config, "temperature")
    if config.unlabelled == "exact":
        hint = "add --unlabelled sampled."
        require_default(config, ["temperature"], "with --unlabelled exact", hint)
    _check_seeds("--split-seed", config.split_seed)


def _check_seeds(flag: str, *seeds: int) -> None:
    """UsageError for a seed that 64 bits with a sign do not hold."""
    for seed in seeds:
        if not -(2**63) <= seed < 2**63:
            raise UsageError(
                f"{flag}: the seed {seed} is out of range.", hint=f"write {2**63 - 1} or less."
            )


_FIRST_SEED = 42
_N_LABELS = (100, 600, 1_000, 3_000)


@dataclass(frozen=True, kw_only=True)
class SsvaeConfig:
    """How robust is a semi-supervised VAE to few and wrong labels?"""

    dataset: str = EMBEDDED
    """digits (comes with the package), mnist or fashion-mnist, in any case."""
    data_dir: Path | None = None
    """Folder with the published IDX files; without it the Hugging Face hub is asked."""
    n_labels: tuple[int, ...] = ()
    """Numbers M of labelled images. Default: those of 100 600 1000 3000 that there are."""
    alpha_values: tuple[float, ...] = (1.0, 10.0, 50.0, 100.0)
    """Weights α of log q(y|x) of a labelled image."""
    corruption_rates: tuple[float, ...] = (0.0, 0.1, 0.2, 0.5)
    """Shares ρ of wrong labels."""
    num_seeds: int = 10
    """Seeds 42, 43, …, shifted by --seed-offset. A seed draws labels, weights, order and noise."""
    seeds: tuple[int, ...] = ()
    """Instead of --num-seeds: how many (3: 0, 1, 2), which (3,5,8; one: 3,) or from:to (10:20)."""
    seed_offset: int = 0
    """Added to every seed."""
    num_epochs: int = 75
    """Passes over all images."""
    eval_frequency: int = 5
    """Evaluate every so many epochs, and always at the end."""
    batch_size: int = 128
    """Images per optimizer step."""
    lr: float = 1e-3
    """Learning rate of Adam."""
    num_style: int = 10
    """Dimensions L of the style z."""
    num_samples: int = 8
    """Styles S drawn per image."""
    temperature: float = TEMPERATURE
    """Temperature of the Gumbel-softmax; only --unlabelled sampled has one."""
    unlabelled: Literal["exact", "sampled"] = "exact"
    """Sum over the ten classes of an image without a label, or sample one (biased, faster)."""
    label_protocol: Literal["fixed", "per-batch"] = "fixed"
    """A fixed balanced subset, or whole labelled batches and new wrong labels in every epoch."""
    supervised: bool = True
    """Also train the classifier alone on the same labels (the fixed ones in either protocol)."""
    factor_scores: bool = False
    """Also measure disentanglement: β-VAE, FactorVAE and MIG scores on moved test images."""
    split_seed: int = 0
    """Which images are in which split; --seeds do not change it."""
    ensemble_size: int | None = None
    """How many runs one program trains; at most 16 on a CPU. Default: 8 on a CPU, 64 on a GPU."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "dataset", canonical(self.dataset))
        check_model(self)
        require_one_or_more(
            self, "num_seeds", "num_epochs", "eval_frequency", "batch_size", "ensemble_size"
        )
        require_above_zero(self, "lr")
        require_seeds(self)
        if not self.n_labels:  # only on a command line: a stored configuration has numbers
            source = check_source(self.dataset, self.data_dir)
            most = math.inf if source is None else source.most_labels
            there = tuple(number for number in _N_LABELS if number <= most)
            object.__setattr__(self, "n_labels", there or _N_LABELS[:1])
        require_different_counts(self, "n_labels")
        _check_grid(self)
        _check_range(self)

    @property
    def all_seeds(self) -> tuple[int, ...]:
        """The seeds that run, in order."""
        chosen = self.seeds or tuple(range(_FIRST_SEED, _FIRST_SEED + self.num_seeds))
        return tuple(seed + self.seed_offset for seed in chosen)


def check_data(config: SsvaeConfig) -> None:
    """Refuse settings that do not fit the data, before anything starts; a report needs no data."""
    source = check_source(config.dataset, config.data_dir)
    check_labels(max(config.n_labels), source, config.dataset)
    if config.factor_scores and source is not None and source.height != source.width:
        raise UsageError(
            "--factor-scores rotates the images, which must be square for that: those of "
            f"{config.dataset} are {source.height}x{source.width}.",
            hint="drop --factor-scores.",
        )


def _check_range(config: SsvaeConfig) -> None:
    first, last = _FIRST_SEED, _FIRST_SEED + config.num_seeds - 1
    flag = "--num-seeds with --seed-offset"
    if config.seeds:
        require_default(config, ["num_seeds"], "beside --seeds", "write one of the two.")
        first, last, flag = min(config.seeds), max(config.seeds), "--seeds with --seed-offset"
    _check_seeds(flag, first + config.seed_offset, last + config.seed_offset)


def _check_grid(config: SsvaeConfig) -> None:
    alphas, rates = config.alpha_values, config.corruption_rates
    if not _are_different(alphas) or not all(0 <= alpha < math.inf for alpha in alphas):
        text = " ".join(map(str, alphas))
        raise UsageError(f"--alpha-values {text}: give different numbers from 0.")
    if not _are_different(rates) or not all(0 <= rate <= 1 for rate in rates):
        raise UsageError(
            f"--corruption-rates {' '.join(map(str, rates))}: give different shares from 0 to 1.",
            hint="write 0.2 for a fifth of the labels.",
        )


def _are_different(values: tuple[float, ...]) -> bool:
    return bool(values) and len(set(values)) == len(values)


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
    label_seed: int = 42
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
        if self.label_protocol == "per-batch":
            hint = "--seed draws the labels there."
            require_default(self, ["label_seed"], "with --label-protocol per-batch", hint)
        _check_seeds("--label-seed", self.label_seed)
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
