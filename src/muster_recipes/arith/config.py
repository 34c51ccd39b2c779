"""The flags of the recipe ``arith`` and how it is trained. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from muster import TrainRecipe, UsageError
from muster_recipes.refusals import require_one_or_more

MAX_DIFFICULTY = 12
#: Positions that the saved model declares; the longest problem with its steps is shorter.
MAX_POSITIONS = 512


@dataclass(frozen=True, kw_only=True)
class ArithConfig:
    """A Llama-architecture decoder on generated arithmetic with worked steps."""

    difficulty: int = 3
    """Operations of a held-out problem; training problems have 1 to this many, a few one more."""
    max_value: int = 99
    """No number and no result on the way is larger; none is below 0."""
    num_train: int = 32_000
    """Training problems."""
    num_val: int = 500
    """Problems of the evaluation after each epoch."""
    num_test: int = 500
    """Problems of the final evaluation."""
    data_seed: int = 0
    """Which problems are drawn; --seed only changes their order."""
    hidden_size: int = 128
    """Width of the model."""
    num_layers: int = 5
    """Decoder layers."""
    num_heads: int = 4
    """Attention heads."""
    intermediate_size: int = 344
    """Width of the feed-forward layers."""

    def __post_init__(self) -> None:
        require_one_or_more(
            self, "num_train", "num_val", "num_test", "hidden_size", "num_layers", "num_heads",
            "intermediate_size",
        )  # fmt: skip
        if not 1 <= self.difficulty <= MAX_DIFFICULTY:
            raise UsageError(
                f"--difficulty {self.difficulty} is not a number of operations from 1 to "
                f"{MAX_DIFFICULTY}."
            )
        if not 9 <= self.max_value <= 9999:
            raise UsageError(f"--max-value {self.max_value} is not from 9 to 9999.")
        if self.hidden_size % (2 * self.num_heads):
            raise UsageError(
                f"--hidden-size {self.hidden_size} must be divisible by 2 × --num-heads "
                f"{self.num_heads}: rotary positions turn pairs of numbers of a head."
            )


RECIPE = TrainRecipe(
    name="arith",
    config=ArithConfig,
    task="muster_recipes.arith.task:ArithTask",
    # Settings of TrainConfig that reach the aim on two CPU cores in a few minutes.
    defaults={
        "epochs": 4,
        "global_batch": 64,
        "lr": 2e-3,
        "schedule": "cosine",
        "min_lr": 1e-5,
        "warmup_epochs": 0.2,
        "weight_decay": 0.01,
        "max_grad_norm": 1.0,
    },
)
