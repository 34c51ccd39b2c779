"""The training task ``ssvae``."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from muster import Task
from muster_recipes.ssvae import items
from muster_recipes.ssvae.hyper import CHOSEN, Hyper
from muster_recipes.ssvae.items import Batch, FixedLabels, Item, RedrawnLabels, TrueLabels
from muster_recipes.ssvae.measures import class_measures, style_leakage
from muster_recipes.ssvae.noise import noise_of
from muster_recipes.ssvae.pool import Pool, load
from muster_recipes.ssvae.ssvae_net import SsvaeNet
from muster_recipes.ssvae.train_config import RECIPE, SsvaeTrainConfig

_FEW = 100


class SsvaeTask(Task):
    """Train one semi-supervised VAE. Metrics: ``accuracy``, ``elbo_nats``, ``calibration_error``.

    At the end ``style_leakage`` of the reported model is said, and written to
    ``style_leakage.json`` beside it. The validation images choose nothing unless --report best
    says so.
    """

    defaults: ClassVar[Mapping[str, Any]] = RECIPE.defaults
    random_items: ClassVar[bool | None] = True
    monitor: ClassVar[str] = "accuracy"
    better: ClassVar[Literal["lower", "higher"]] = "higher"

    def __init__(self, config: SsvaeTrainConfig) -> None:
        self.config = config
        self.reported = config.report

    @cached_property
    def _splits(self) -> dict[str, Pool]:
        config = self.config
        return load(config.dataset, config.data_dir, config.split_seed)

    @cached_property
    def _hyper(self) -> Hyper:
        chosen = {name: getattr(self.config, name) for name in CHOSEN}
        return Hyper(num_pixels=self._splits["train"].x.shape[1], **chosen)

    def model(self) -> nn.Module:
        # From the model seed, with which the global generator was seeded.
        return SsvaeNet(self._hyper, self.config.alpha, seed=int(torch.randint(2**62, ())))

    def dataset(self, split: Literal["train", "val", "test"]) -> Dataset[Item]:
        config, pool = self.config, self._splits[split]
        if split != "train":
            return TrueLabels(pool)
        if config.label_protocol == "per-batch":
            return RedrawnLabels(pool, config.n_labels, config.corruption_rate)
        return FixedLabels(pool, config.n_labels, config.corruption_rate, config.label_seed)

    def collate(self, samples: Sequence[Item]) -> Batch:
        return items.collate(samples)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        # Noise is drawn outside the model: torch.compile's code for a CPU (2.13) that turns int64
        # into float32 writes beyond its memory.
        noise = noise_of(self._hyper, batch.key)
        objective: Tensor = model(*batch[:3], *noise).objective
        return -objective

    def score(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        eps, _ = noise_of(self._hyper, batch.key)
        terms = model(*batch[:3], eps)
        return {"log_q": terms.log_q, "bound": terms.bound, "label": batch.label}

    def summarise(self, columns: dict[str, Tensor]) -> dict[str, Any]:
        """``elbo_nats`` is the bound without labels, exact over the classes, mean per image."""
        (measured,) = class_measures(columns["log_q"].unsqueeze(0), columns["label"])
        return {
            "accuracy": measured["accuracy"],
            "elbo_nats": float(columns["bound"].double().mean()),
            "calibration_error": measured["calibration_error"],
            "data": self.config.dataset,
        }

    def finish(self, model: nn.Module, folder: str) -> None:
        """Style leakage needs the training images, which no evaluation sees: measured here."""
        assert isinstance(model, SsvaeNet)
        weights = {name: weight.detach().unsqueeze(0) for name, weight in model.weights.items()}
        test, train = self._splits["test"], self._splits["train"]
        if self.rehearsing:
            test, train = (Pool(each.x[:_FEW], each.labels[:_FEW]) for each in (test, train))
        leakage = style_leakage(weights, test, train, self._hyper).item()
        known = leakage if math.isfinite(leakage) else None
        Path(folder, "style_leakage.json").write_text(json.dumps({"style_leakage": known}) + "\n")
