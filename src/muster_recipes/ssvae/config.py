"""The flags of ``muster sweep ssvae``. Light: the coordinator imports this, torch stays out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from muster import UsageError
from muster_recipes.ssvae.dataset import EMBEDDED, canonical, check_source

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
    """These seeds instead of a number of them."""
    seed_offset: int = 0
    """Added to every seed."""
    num_epochs: int = 75
    """Passes over all images."""
    eval_frequency: int = 5
    """Evaluate every so many epochs; the end always is."""
    batch_size: int = 128
    """Images per optimizer step."""
    lr: float = 1e-3
    """Learning rate of Adam."""
    num_style: int = 10
    """Dimensions L of the style z."""
    num_samples: int = 8
    """Styles S drawn per image."""
    temperature: float = 0.66
    """Temperature of the Gumbel-softmax; only --unlabelled sampled has one."""
    unlabelled: Literal["exact", "sampled"] = "exact"
    """Sum over the ten classes of an image without a label, or sample one (biased, faster)."""
    label_protocol: Literal["fixed", "per-batch"] = "fixed"
    """A fixed balanced subset, or whole labelled batches and new wrong labels in every epoch."""
    supervised: bool = True
    """Train the classifier alone on the same labels, too (on the fixed ones, in any protocol)."""
    factor_scores: bool = False
    """Measure disentanglement, too: β-VAE, FactorVAE and MIG on moved test images."""
    split_seed: int = 0
    """Which images are in which split; --seeds do not change it."""
    ensemble_size: int | None = None
    """Runs that one program trains together, on a CPU 16 at most. Default: 8 there, 64 on a GPU."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "dataset", canonical(self.dataset))
        _check_counts(self)
        for name in ("lr", "temperature"):
            if not 0 < getattr(self, name) < math.inf:
                raise UsageError(f"{_flag(name)} {getattr(self, name)} must be above 0 and finite.")
        most = check_source(self.dataset, self.data_dir)
        if not self.n_labels:
            there = [number for number in _N_LABELS if most is None or number <= most]
            object.__setattr__(self, "n_labels", tuple(there) or _N_LABELS[:1])
        _check_grid(self)
        if most is not None and max(self.n_labels) > most:
            raise UsageError(
                f"--n-labels {max(self.n_labels)}: the training images of {self.dataset} allow "
                f"{most} labels with equal numbers per class.",
                hint=f"write {most} or less.",
            )

    @property
    def all_seeds(self) -> tuple[int, ...]:
        """The seeds that run, in order."""
        chosen = self.seeds or tuple(range(_FIRST_SEED, _FIRST_SEED + self.num_seeds))
        return tuple(seed + self.seed_offset for seed in chosen)


def _check_counts(config: SsvaeConfig) -> None:
    for name in ("num_seeds", "num_epochs", "eval_frequency", "batch_size", "num_style", "num_samples"):  # fmt: skip  # noqa: E501
        if getattr(config, name) < 1:
            raise UsageError(
                f"{_flag(name)} {getattr(config, name)} is too small.", hint="write 1 or more."
            )
    if config.ensemble_size is not None and config.ensemble_size < 1:
        raise UsageError(f"--ensemble-size {config.ensemble_size} is too small.", hint="write 1 or more.")  # fmt: skip  # noqa: E501


def _check_grid(config: SsvaeConfig) -> None:
    if len(set(config.seeds)) != len(config.seeds):
        raise UsageError(f"--seeds {_words(config.seeds)} names a seed twice.")
    if min(config.n_labels) < 1 or _repeats(config.n_labels):
        raise UsageError(
            f"--n-labels {_words(config.n_labels)}: give different whole numbers from 1."
        )
    alphas = config.alpha_values
    if not alphas or _repeats(alphas) or not all(0 <= a < math.inf for a in alphas):
        raise UsageError(f"--alpha-values {_words(alphas)}: give different numbers from 0.")
    rates = config.corruption_rates
    if not rates or _repeats(rates) or not all(0 <= rate <= 1 for rate in rates):
        raise UsageError(
            f"--corruption-rates {_words(rates)}: give different shares from 0 to 1.",
            hint="write 0.2 for a fifth of the labels.",
        )


def _repeats(values: tuple[float, ...]) -> bool:
    return len(set(values)) != len(values)


def _words(values: tuple[float, ...]) -> str:
    return " ".join(map(str, values))


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
