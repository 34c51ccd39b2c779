"""The training task ``har``."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from muster import Task
from muster_recipes.har.config import RECIPE, HarConfig
from muster_recipes.har.nets import ConvNet, VitHead
from muster_recipes.har.synthetic import make_windows
from muster_recipes.har.uci import read_uci
from muster_recipes.har.windows import (
    CLASSES,
    Windows,
    WindowSet,
    moments,
    num_inputs,
    split_by_subject,
)


class HarTask(Task):
    """Classify windows. ``accuracy`` is per window; flatten also has ``channel_accuracy``."""

    defaults: ClassVar[Mapping[str, Any]] = RECIPE.defaults
    monitor: ClassVar[str] = "accuracy"
    better: ClassVar[Literal["lower", "higher"]] = "higher"

    def __init__(self, config: HarConfig) -> None:
        self.config = config

    @cached_property
    def splits(self) -> dict[str, Windows]:
        """train, val and test; no subject is in two of them."""
        config = self.config
        if config.data_dir is None:
            rest, test = make_windows(
                config.synthetic_subjects, config.synthetic_windows, config.synthetic_seed
            )
        else:
            rest, test = read_uci(config.data_dir)
        train, val = split_by_subject(rest, config.val_share, config.split_seed)
        return {"train": train, "val": val, "test": test}

    @cached_property
    def _moments(self) -> tuple[Tensor, Tensor]:
        return moments(self.splits["train"])

    def model(self) -> nn.Module:
        channels = num_inputs(self.config.mode)
        if self.config.encoder == "vit":
            assert self.config.encoder_path is not None
            return VitHead(self.config.encoder_path, channels, len(CLASSES))
        return ConvNet(channels, len(CLASSES), self.config.width)

    def dataset(self, split: Literal["train", "val", "test"]) -> WindowSet:
        return WindowSet(self.splits[split], *self._moments, self.config.mode)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        signals, labels, _ = batch
        return F.cross_entropy(
            model(signals).float(),
            labels,
            reduction="none",
            label_smoothing=self.config.label_smoothing,
        )

    def score(self, model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> dict[str, Tensor]:
        signals, labels, windows = batch
        return {
            "log_probs": F.log_softmax(model(signals).float(), 1),
            "label": labels,
            "window": windows,
        }

    def summarise(self, columns: dict[str, Tensor]) -> dict[str, Any]:
        """Nine channels of a window vote by mean log-probability; other modes have one voter.

        ``loss`` is the plain negative log-likelihood per sample, without label smoothing.
        """
        log_probs, label = columns["log_probs"].double(), columns["label"]
        voted, window_label = vote(columns["window"], log_probs, label)
        table = confusion(window_label, voted.argmax(1), len(CLASSES))
        metrics: dict[str, Any] = {
            "loss": float(F.nll_loss(log_probs, label)),
            "accuracy": int(table.diag().sum()) / len(window_label),
        }
        if self.config.mode == "flatten":
            metrics["channel_accuracy"] = float((log_probs.argmax(1) == label).double().mean())
        return metrics | {
            "class_accuracy": {
                name: int(row[number]) / int(row.sum()) if row.any() else None
                for number, (name, row) in enumerate(zip(CLASSES, table, strict=True))
            },
            "confusion": table.tolist(),
            "data": self.config.data,
        }

    def optimizer(self, model: nn.Module, lr: float, weight_decay: float) -> torch.optim.Optimizer:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=lr, weight_decay=weight_decay)


def vote(windows: Tensor, log_probs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Mean log-probabilities [w, classes] and labels [w] of the different ``windows``.

    Sorted by window; float64, so that the order of the samples does not matter to a vote. A sample
    appears once in a data set's columns, whatever the number of ranks, so each counts once.
    """
    numbers, where = torch.unique(windows, return_inverse=True)
    sums = torch.zeros(len(numbers), log_probs.shape[1], dtype=torch.float64)
    sums.index_add_(0, where, log_probs.double())
    counts = torch.bincount(where, minlength=len(numbers))
    window_labels = torch.empty(len(numbers), dtype=labels.dtype)
    window_labels[where] = labels  # all samples of a window have its label
    return sums / counts[:, None], window_labels


def confusion(labels: Tensor, guesses: Tensor, num_classes: int) -> Tensor:
    """[true class, guessed class] counts."""
    pairs = labels * num_classes + guesses
    return torch.bincount(pairs, minlength=num_classes**2).view(num_classes, num_classes)
