"""The flags of the recipe ``digits`` and how it is trained. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from muster import TrainRecipe, UsageError


@dataclass(frozen=True, kw_only=True)
class DigitsConfig:
    """An image classifier on 8x8 digits that come with the package, or on larger sets."""

    dataset: Literal["digits", "mnist", "fashion-mnist", "cifar10"] = "digits"
    """digits needs no download; the others are read from --data-dir."""
    data_dir: Path | None = None
    """Folder with the published files of --dataset."""
    model: Literal["cnn", "mlp"] = "cnn"
    """A convolutional network, or two hidden layers."""
    width: int = 32
    """Channels of the first convolutions; the mlp has 8 times as many units per layer."""
    augment: bool = True
    """Shift training images at random, and mirror those of cifar10."""
    split_seed: int = 0
    """Which samples are in which split; --seed does not change it."""

    def __post_init__(self) -> None:
        if self.width < 8 or self.width % 8:
            raise UsageError(f"--width {self.width} must be a multiple of 8.")
        if self.dataset == "digits" and self.data_dir is not None:
            raise UsageError(
                f"--data-dir {self.data_dir} has no effect: --dataset digits comes with the "
                "package.",
                hint="drop it, or say which set it holds with --dataset mnist, fashion-mnist "
                "or cifar10.",
            )
        if self.dataset != "digits" and self.data_dir is None:
            raise UsageError(
                f"--dataset {self.dataset} is read from files, and --data-dir is not given.",
                hint="name the folder that holds the published files; nothing is downloaded.",
            )


RECIPE = TrainRecipe(
    name="digits",
    config=DigitsConfig,
    task="muster_recipes.digits.task:DigitsTask",
    # Settings of TrainConfig that reach 98 % on two CPU cores in well under a minute.
    defaults={
        "epochs": 20,
        "global_batch": 64,
        "lr": 3e-3,
        "schedule": "cosine",
        "warmup_epochs": 1.0,
        "weight_decay": 1e-2,
    },
)
