"""The flags of the recipe ``ssm``. Light: the coordinator imports this, torch stays out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from muster import UsageError
from muster_recipes.refusals import (
    require_above_zero,
    require_default,
    require_different_counts,
    require_one_or_more,
    require_seeds,
)
from muster_recipes.ssm.problem import has_finite_powers, read_data_file


@dataclass(frozen=True, kw_only=True)
class SsmConfig:
    """Guess & Check against gradient descent on diagonal state-space models."""

    num_seeds: int = 4
    """Seeds 0 … n-1, shifted by --seed-offset. A seed draws the teacher and its data."""
    seeds: tuple[int, ...] = ()
    """Instead of --num-seeds: how many (3: 0, 1, 2), which (3,5,8; one: 3,) or from:to (10:20)."""
    seed_offset: int = 0
    """Added to every seed."""
    teacher_ranks: tuple[int, ...] = (1,)
    """Ranks R of the teacher."""
    student_dims: tuple[int, ...] = (16, 32, 64, 150)
    """Widths d of the student."""
    sequence_length: int = 5
    """k: the loss sees lags 1 … k-1."""
    num_sequences: int = 1
    """N: training sequences per seed."""
    input_e1: bool = False
    """Use w = e_1 instead of drawing the training sequences."""
    alpha: float | None = None
    """Fix every teacher parameter instead of drawing it from N(0.5, 0.1²)."""
    eps_train: float = 1e-5
    """A guess is accepted when its training loss is below this."""
    data_file: Path | None = None
    """JSON list of {"alpha": x or [..], "w_sequences": [[..]]}; the pair is seed mod number."""
    gnc: bool = True
    """Run Guess & Check."""
    gnc_num_samples: int = 1_000_000
    """Students drawn per cell (seed, rank, width)."""
    gnc_batch_size: int = 2_000_000
    """Students per task: a larger cell is split into blocks that run anywhere; a GPU gets up to 256
    of them at once."""
    gd: bool = True
    """Run gradient descent."""
    gd_lr: float = 1e-3
    """Learning rate."""
    gd_epochs: int = 10_000
    """Steps of full-batch gradient descent."""
    gd_init_scale: float = 1e-2
    """Scale s of the initial values."""
    gd_optimizer: Literal["adam", "sgd"] = "adam"
    """Optimiser."""
    gd_scheduler: Literal["none", "step", "exponential", "cosine"] = "none"
    """Schedule of the learning rate: step divides it by 10 after each third of the steps,
    exponential ends at a hundredth, cosine at zero."""
    gd_init_type: Literal["regular", "near_one", "positive", "one_large"] = "regular"
    """s·N(0,1); 1 + s·N(0,1); |s·N(0,1)|; regular with the largest entry times 5."""

    def __post_init__(self) -> None:
        if not (self.gnc or self.gd):
            raise UsageError("--no-gnc and --no-gd leave nothing to run.")
        require_one_or_more(
            self, "num_seeds", "num_sequences", "gnc_num_samples", "gnc_batch_size", "gd_epochs"
        )
        require_different_counts(self, "teacher_ranks", "student_dims")
        require_above_zero(self, "eps_train", "gd_lr", "gd_init_scale")
        require_seeds(self)
        if self.sequence_length < 2:
            raise UsageError(
                f"--sequence-length {self.sequence_length} has no lag: the loss would be empty.",
                hint="write 2 or more.",
            )
        if self.alpha is not None and not has_finite_powers(self.alpha, self.num_lags):
            raise UsageError(f"--alpha {self.alpha} is not a finite number, or its powers are not.")
        if self.data_file is not None:
            _check_data_file(self, self.data_file)

    def check_new(self) -> None:
        """Raise UsageError for a flag without effect, which an older run may have."""
        if self.seeds:
            require_default(self, ["num_seeds"], "beside --seeds", "write one of the two.")
        # Only what may change later: a run that lacks descent at first has its settings by then.
        if not self.gnc:
            require_default(self, ["gnc_num_samples"], "with --no-gnc")

    @property
    def all_seeds(self) -> tuple[int, ...]:
        """The seeds that run, in order."""
        chosen = self.seeds or tuple(range(self.num_seeds))
        return tuple(seed + self.seed_offset for seed in chosen)

    @property
    def num_lags(self) -> int:
        """K = k - 1."""
        return self.sequence_length - 1


def _check_data_file(config: SsmConfig, path: Path) -> None:
    for flag, is_given in (("--alpha", config.alpha is not None), ("--input-e1", config.input_e1)):
        if is_given:
            raise UsageError(
                f"{flag} has no effect beside --data-file {path}, which gives the teachers "
                "and the sequences.",
                hint="drop one of the two.",
            )
    # Read now: a mistake in the last entry must not come to light after hours.
    read_data_file(path, config)
