"""The baseline: the classifier half alone, trained on the labelled images of each run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from muster import seed_of
from muster_recipes.ssvae.ensemble import (
    Ensemble,
    OnEpoch,
    OnStep,
    RunSpec,
    Settings,
    begin,
    end_epoch,
    num_steps,
)
from muster_recipes.ssvae.hyper import Hyper
from muster_recipes.ssvae.labels import choose_labels
from muster_recipes.ssvae.networks import class_logits
from muster_recipes.ssvae.parameters import Parameters, init_parameters
from muster_recipes.ssvae.pool import Pool

_LAYERS = ("encoder", "classifier")


def train_supervised(
    pool: Pool,
    runs: Sequence[RunSpec],
    hyper: Hyper,
    settings: Settings,
    device: str = "cpu",
    on_epoch: OnEpoch = lambda ensemble: None,
    state: Mapping[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
    on_step: OnStep = lambda ensemble, share: None,
) -> Ensemble:
    """Maximise log q(y|x) over the labels that the semi-supervised run of the same seed has.

    All ``runs`` have the same ``num_labels``. They start from the same weights of the classifier
    and take as many steps of the same size; a batch holds ``batch_size`` labelled images, or all
    of them where they are fewer. An epoch is as many steps as one over the pool; its objective is
    the mean of log q(y|x), nats.
    """
    chosen = [choose_labels(pool.labels, r.num_labels, r.corruption_rate, r.seed) for r in runs]
    x = torch.stack([pool.x[each.index] for each in chosen]).to(device, dtype)
    given = torch.stack([each.given for each in chosen]).to(device)
    rows = torch.arange(len(runs), device=device).unsqueeze(1)
    steps = num_steps(len(pool.labels), settings)

    def initial(seeds: Sequence[int]) -> Parameters:
        every = init_parameters(hyper, seeds)
        return {name: value for name, value in every.items() if name.split("_")[0] in _LAYERS}

    ensemble = begin(initial, runs, settings, device, dtype, state)
    while ensemble.epoch < settings.num_epochs:
        batches = batches_of_epoch(given.shape[1], runs, settings, ensemble.epoch, steps)
        total = torch.zeros(len(runs), device=device, dtype=torch.float64)
        for number, batch in enumerate(batches.to(device).unbind(1), 1):
            logits = class_logits(ensemble.parameters, x[rows, batch]).logits
            targets = given.gather(1, batch)
            losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
            per_run = losses.view(len(runs), -1).mean(1)
            per_run.sum().backward()  # type: ignore[no-untyped-call]
            ensemble.optimizer.step()
            ensemble.optimizer.zero_grad(set_to_none=True)
            total -= per_run.detach()
            on_step(ensemble, number / steps)
        end_epoch(ensemble, (total / steps).tolist(), runs, initial)
        on_epoch(ensemble)
    return ensemble


def batches_of_epoch(
    num_labels: int, runs: Sequence[RunSpec], settings: Settings, epoch: int, steps: int
) -> Tensor:
    """Places among the labelled images, int64 [R, steps, size]; none twice in a batch.

    The labelled images are shuffled anew whenever too few are left for a batch.
    """
    size = min(settings.batch_size, num_labels)
    per_round = num_labels // size
    by_seed = {}
    for seed in {run.seed for run in runs}:
        stream = torch.Generator().manual_seed(seed_of("ssvae-supervised", seed, epoch))
        rounds = [
            torch.randperm(num_labels, generator=stream)[: per_round * size].view(per_round, size)
            for _ in range(-(-steps // per_round))
        ]
        by_seed[seed] = torch.cat(rounds)[:steps]
    return torch.stack([by_seed[run.seed] for run in runs])
