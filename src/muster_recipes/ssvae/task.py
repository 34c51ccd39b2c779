"""The training task ``ssvae``: its images with their labels, its model, and the task itself."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from muster import Task, UsageError
from muster_recipes.digits.files import NUM_CLASSES
from muster_recipes.ssvae.config import CHOSEN, RECIPE, Hyper, SsvaeTrainConfig
from muster_recipes.ssvae.labels import choose_labels
from muster_recipes.ssvae.measures import class_measures, style_leakage
from muster_recipes.ssvae.networks import init_parameters
from muster_recipes.ssvae.noise import Noise, noise_of, step_keys, uniforms
from muster_recipes.ssvae.objective import Terms, objective
from muster_recipes.ssvae.pool import Pool, load


class Item(NamedTuple):
    """``x`` float32 [D]; ``label`` int64; ``chance`` that it is known; ``key`` of its noise."""

    x: Tensor
    label: Tensor
    chance: Tensor
    key: Tensor


class Batch(NamedTuple):
    """Items put together; ``is_labelled`` bool [B]."""

    x: Tensor
    label: Tensor
    is_labelled: Tensor
    key: Tensor


class KnownLabels(Dataset[Item]):
    """Images whose labels are the same in every epoch; the model is told those of ``chances`` 1.

    ``chances`` float32 [n]. Noise has ``keys`` int64 [n]; without these it is new in every epoch.
    """

    def __init__(self, pool: Pool, chances: Tensor, keys: Tensor | None = None) -> None:
        self._pool, self._chances, self._keys = pool, chances, keys

    def __len__(self) -> int:
        return len(self._pool.labels)

    def __getitem__(self, index: int) -> Item:
        key = _new_key() if self._keys is None else self._keys[index]
        return Item(self._pool.x[index], self._pool.labels[index], self._chances[index], key)


class RedrawnLabels(Dataset[Item]):
    """The older protocol: a batch is labelled as a whole with probability ``num_labels`` / n, and
    every label of it is wrong with probability ``corruption_rate``; all drawn in every epoch."""

    def __init__(self, pool: Pool, num_labels: int, corruption_rate: float) -> None:
        self._pool = pool
        self._chance = torch.tensor(num_labels / len(pool.labels))
        self._corruption_rate = corruption_rate

    def __len__(self) -> int:
        return len(self._pool.labels)

    def __getitem__(self, index: int) -> Item:
        key = _new_key()
        label = self._pool.labels[index]
        if bool(torch.rand(()) < self._corruption_rate):
            label = (label + torch.randint(1, NUM_CLASSES, ())) % NUM_CLASSES
        return Item(self._pool.x[index], label, self._chance, key)


def _new_key() -> Tensor:
    # The global generator is seeded for every epoch and item: the noise of an image is new in every
    # epoch, and the same on any number of ranks and loaders.
    return torch.randint(-(2**63), 2**63 - 1, ())


def collate(items: Sequence[Item]) -> Batch:
    """A batch; one draw, from the first item's key, is compared with every item's chance."""
    x, label, chance, key = (torch.stack(column) for column in zip(*items, strict=True))
    # Another stream than that of the noise, whose key this is. 0 < drawn < 1: fixed labels stay.
    drawn = uniforms(~key[:1], 1)[0]
    return Batch(x, label, drawn < chance, key)


class SsvaeNet(nn.Module):
    """The model with its objective in ``forward``, where wrappers for several devices see it.

    ``alpha``: weight of log q(y|x) of a label. The initial weights follow from ``seed``.
    """

    def __init__(self, hyper: Hyper, alpha: float, seed: int) -> None:
        super().__init__()
        self.hyper = hyper
        self.alpha = alpha
        # Without the run dimension: FSDP cuts parameters along their first one.
        self.weights = nn.ParameterDict(
            {name: value[0] for name, value in init_parameters(hyper, [seed]).items()}
        )

    def forward(
        self,
        x: Tensor,
        labels: Tensor,
        is_labelled: Tensor,
        eps: Tensor,
        gumbel: Tensor | None = None,
    ) -> Terms:
        """The terms [B] (log_q [B, C]) of pixels ``x`` [B, D] with ``labels`` where known, [B].

        Noise ``eps`` [B, S, L] and ``gumbel`` [B, S, C]; without the latter the classes of an
        image that has no label are summed over, whatever the training does.
        """
        if torch.is_autocast_enabled(x.device.type):
            raise UsageError(
                "ssvae sums over pixels and samples, for which 16 bits are too few.",
                hint="use --precision fp32 or tf32.",
            )
        kind: Literal["exact", "sampled"] = "exact" if gumbel is None else "sampled"
        noise = Noise(eps.unsqueeze(0), None if gumbel is None else gumbel.unsqueeze(0))
        terms = objective(
            {name: value.unsqueeze(0) for name, value in self.weights.items()},
            x.unsqueeze(0),
            labels.unsqueeze(0),
            is_labelled.unsqueeze(0),
            x.new_full((1,), self.alpha),
            noise,
            dataclasses.replace(self.hyper, unlabelled=kind),
        )
        # No views: FSDP puts a hook on what a module returns, which a view might lose.
        return Terms(*(term.squeeze(0).clone() for term in terms))


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
        rate, told = config.corruption_rate, torch.zeros(len(pool.labels))
        if split != "train":  # the model is not told any label, and the noise is always the same
            return KnownLabels(pool, told, step_keys([0], 0, len(told), "cpu")[0])
        if config.label_protocol == "per-batch":
            return RedrawnLabels(pool, config.n_labels, rate)
        chosen = choose_labels(pool.labels, config.n_labels, rate, config.label_seed)
        given = pool.labels.index_copy(0, chosen.index, chosen.given)
        return KnownLabels(Pool(pool.x, given), told.index_fill_(0, chosen.index, 1.0))

    def collate(self, samples: Sequence[Item]) -> Batch:
        return collate(samples)

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
