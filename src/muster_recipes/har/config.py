"""The flags of the recipe ``har`` and how it is trained. No torch here."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from muster import TrainRecipe, UsageError
from muster_recipes.refusals import require_default

_SYNTHETIC = ("synthetic_subjects", "synthetic_windows", "synthetic_seed")


@dataclass(frozen=True, kw_only=True)
class HarConfig:
    """Six activities from 9 inertial channels of 128 steps, split by subject."""

    data_dir: Path | None = None
    """Folder of the UCI-HAR data set (with train and test in it); synthetic windows otherwise."""
    mode: Literal["stack", "flatten", "average", "first"] = "stack"
    """All channels as one input; each channel a sample of its own, and the nine vote at
    evaluation; the mean of the channels; channel 0."""
    encoder: Literal["conv", "vit"] = "conv"
    """A 1-D convolutional residual network, or a head on a frozen ViT that sees line charts."""
    encoder_path: Path | None = None
    """Hugging Face folder of the ViT."""
    width: int = 32
    """Channels of the first stage of the convolutional network."""
    label_smoothing: float = 0.1
    """Share of the target spread over all classes in training."""
    val_share: float = 0.2
    """Share of the training folder's subjects that validate instead."""
    split_seed: int = 0
    """Which of those subjects validate; --seed does not change it."""
    synthetic_subjects: int = 30
    """Subjects of the synthetic windows; 3 in 10 are the test split."""
    synthetic_windows: int = 36
    """Synthetic windows per subject, of each class alike."""
    synthetic_seed: int = 0
    """Which synthetic windows are drawn."""

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing < 1:
            raise UsageError(f"--label-smoothing {self.label_smoothing} is not from 0 to below 1.")
        if not 0 < self.val_share < 1:
            raise UsageError(f"--val-share {self.val_share} is not between 0 and 1.")
        if self.width < 8 or self.width % 8:
            raise UsageError(f"--width {self.width} must be a multiple of 8.")
        if self.synthetic_subjects < 4:
            raise UsageError(
                f"--synthetic-subjects {self.synthetic_subjects} are too few to train, validate "
                "and test on different ones.",
                hint="write 4 or more.",
            )
        if self.synthetic_windows < 6:
            raise UsageError(
                f"--synthetic-windows {self.synthetic_windows} leaves out some of the 6 classes.",
                hint="write 6 or more.",
            )
        if self.encoder == "vit":
            _check_encoder(self.encoder_path)
        else:
            require_default(
                self, ["encoder_path"], "with --encoder conv", hint="add --encoder vit."
            )

    def check_new(self) -> None:
        """Raise UsageError for a flag without effect, which an older run may have."""
        if self.data_dir is not None:
            require_default(self, _SYNTHETIC, "with --data-dir")
        if self.encoder == "vit":
            require_default(self, ["width"], "with --encoder vit")

    @property
    def data(self) -> str:
        """What the windows are, as every result says."""
        return "synthetic" if self.data_dir is None else "uci-har"


def _check_encoder(path: Path | None) -> None:
    """UsageError unless ``path`` looks like a Hugging Face ViT folder."""
    if path is None:
        raise UsageError(
            "--encoder vit needs --encoder-path.",
            hint="name the Hugging Face folder of a ViT (config.json and its weights); nothing "
            "is downloaded.",
        )
    try:
        kind = json.loads((path / "config.json").read_text())["model_type"]
    except OSError as error:
        raise UsageError(
            f"Cannot read {path / 'config.json'}: {error.strerror}.",
            hint="--encoder-path is the Hugging Face folder of a ViT.",
        ) from None
    except (ValueError, KeyError, TypeError):
        raise UsageError(f"{path / 'config.json'} has no model_type.") from None
    if kind != "vit":
        raise UsageError(f"--encoder-path {path} holds a model of type {kind!r}, not 'vit'.")


RECIPE = TrainRecipe(
    name="har",
    config=HarConfig,
    task="muster_recipes.har.task:HarTask",
    # Settings of the trainer that this task comes from: learning rate and batch are per rank.
    defaults={
        "epochs": 30,
        "batch_size": 32,
        "base_lr": 1e-3,
        "lr_scaling": "linear",
        "schedule": "cosine",
        "min_lr": 1e-6,
        "warmup_epochs": 2.0,
        "weight_decay": 1e-4,
        "max_grad_norm": 1.0,
        "patience": 7,
    },
)
