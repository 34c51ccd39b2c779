"""Many semi-supervised VAEs of the same shape, trained as one program.

All tensors have a leading run dimension. Runs never mix: each has its own weights, order of the
images, labels and noise, all of which are functions of its own values alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from muster import seed_of
from muster_recipes.ssvae.config import Hyper
from muster_recipes.ssvae.labels import choose_labels, labels_of_epoch
from muster_recipes.ssvae.networks import Parameters, class_logits, init_parameters
from muster_recipes.ssvae.noise import Noise, step_noise
from muster_recipes.ssvae.objective import objective
from muster_recipes.ssvae.pool import Pool


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """What may differ between the runs of an ensemble."""

    seed: int
    num_labels: int
    alpha: float
    corruption_rate: float


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What all runs of an ensemble share; see ``SsvaeConfig``."""

    num_epochs: int
    batch_size: int
    lr: float
    eval_frequency: int
    label_protocol: str = "fixed"

    def is_evaluated(self, epoch: int) -> bool:
        """Whether the state after ``epoch`` (from 1) is evaluated; the last one always is."""
        return epoch % self.eval_frequency == 0 or epoch == self.num_epochs


class Failure(NamedTuple):
    """The first value of a run that was not a finite number, its epoch (from 1), and what it is."""

    epoch: int
    value: float
    what: str = "objective"


@dataclass(kw_only=True)
class Ensemble:
    """Runs in training: everything that a later process needs in order to go on.

    ``parameters``: leaves [R, ...] on the device. ``epoch``: how many are over. ``objectives``:
    per epoch the mean over the images of each run, nats. ``failures``: by run.
    """

    parameters: Parameters
    optimizer: torch.optim.Adam
    epoch: int = 0
    objectives: list[list[float]] = field(default_factory=list)
    failures: dict[int, Failure] = field(default_factory=dict)

    def is_live(self, num_runs: int) -> Tensor:
        """bool [R]: which runs have not failed."""
        return torch.tensor([run not in self.failures for run in range(num_runs)])

    def state(self) -> dict[str, Any]:
        """Tensors and plain values; ``restored`` takes it."""
        return {
            "parameters": {name: value.detach().cpu() for name, value in self.parameters.items()},
            "optimizer": self.optimizer.state_dict(),
            "epoch": self.epoch,
            "objectives": self.objectives,
            "failures": {str(run): list(failure) for run, failure in self.failures.items()},
        }


#: Called after every epoch with the ensemble.
OnEpoch = Callable[[Ensemble], None]
#: Called now and then with the share of the epoch that is done.
OnStep = Callable[[Ensemble, float], None]
#: Seeds of runs to their weights before the first step.
Initial = Callable[[Sequence[int]], Parameters]


def train_ensemble(
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
    """Train all ``runs`` on ``pool`` to the end of the last epoch, from ``state`` if given.

    A run equals the training of that run alone, to rounding. An epoch passes over every image of
    the pool once, with its label if the run knows one. A run whose objective or weights are not
    finite at the end of an epoch gets a `Failure`; it is put back to its initial weights, so that
    the program keeps its shape and the other runs keep every bit.
    """
    here = Pool(pool.x.to(device, dtype), pool.labels.to(device))
    # Runs of one seed have the same noise: it is drawn once for all of them.
    distinct = sorted({run.seed for run in runs})
    seeds = torch.tensor(distinct, device=device)
    which = torch.tensor([distinct.index(run.seed) for run in runs], device=device)
    alpha = torch.tensor([run.alpha for run in runs], device=device, dtype=dtype)
    given, is_labelled = known_labels(pool.labels, runs, settings, device)
    initial = partial(init_parameters, hyper)
    ensemble = begin(initial, runs, settings, device, dtype, state)
    while ensemble.epoch < settings.num_epochs:
        epoch = ensemble.epoch
        order = epoch_orders(len(pool.labels), runs, epoch).to(device)
        if settings.label_protocol == "per-batch":
            given, is_labelled = _redrawn_labels(here.labels, runs, settings, epoch, order)
        weight = alpha.where(ensemble.is_live(len(runs)).to(device), 0)
        total = torch.zeros(len(runs), device=device, dtype=torch.float64)
        num_batches = num_steps(len(pool.labels), settings)
        for batch in range(num_batches):
            chosen = order[:, batch * settings.batch_size : (batch + 1) * settings.batch_size]
            step = epoch * num_batches + batch
            eps, gumbel = step_noise(hyper, seeds, step, chosen.shape[1], device)
            noise = Noise(eps[which], None if gumbel is None else gumbel[which])
            terms = objective(
                ensemble.parameters,
                here.x[chosen],
                given.gather(1, chosen),
                is_labelled.gather(1, chosen),
                weight,
                noise,
                hyper,
            )
            # The sum over runs: each run's gradient is that of its own mean over the batch.
            (-terms.objective.mean(1)).sum().backward()  # type: ignore[no-untyped-call]
            ensemble.optimizer.step()
            ensemble.optimizer.zero_grad(set_to_none=True)
            total += terms.objective.detach().sum(1)
            on_step(ensemble, (batch + 1) / num_batches)
        end_epoch(ensemble, (total / len(pool.labels)).tolist(), runs, initial)
        on_epoch(ensemble)
    return ensemble


def num_steps(num_images: int, settings: Settings) -> int:
    """Optimizer steps per epoch; the last batch may be smaller."""
    return math.ceil(num_images / settings.batch_size)


def known_labels(
    labels: Tensor, runs: Sequence[RunSpec], settings: Settings, device: str = "cpu"
) -> tuple[Tensor, Tensor]:
    """Every run's labels as training sees them, and whether they are known; both [R, n]."""
    given = labels.cpu().repeat(len(runs), 1)
    is_labelled = torch.zeros_like(given, dtype=torch.bool)
    if settings.label_protocol == "fixed":
        for row, run in enumerate(runs):
            chosen = choose_labels(labels.cpu(), run.num_labels, run.corruption_rate, run.seed)
            given[row, chosen.index] = chosen.given
            is_labelled[row, chosen.index] = True
    return given.to(device), is_labelled.to(device)


def epoch_orders(num_images: int, runs: Sequence[RunSpec], epoch: int) -> Tensor:
    """The order in which each run sees the pool, int64 [R, n]: a function of (seed, epoch)."""
    by_seed = {}
    for seed in {run.seed for run in runs}:
        stream = torch.Generator().manual_seed(seed_of("ssvae-order", seed, epoch))
        by_seed[seed] = torch.randperm(num_images, generator=stream)
    return torch.stack([by_seed[run.seed] for run in runs])


def _redrawn_labels(
    labels: Tensor, runs: Sequence[RunSpec], settings: Settings, epoch: int, order: Tensor
) -> tuple[Tensor, Tensor]:
    """Labels of this epoch under the older protocol, both [R, n] by image."""
    given = torch.empty_like(order)
    is_labelled = torch.empty_like(order, dtype=torch.bool)
    for row, run in enumerate(runs):
        seen, is_seen = labels_of_epoch(
            labels[order[row]].cpu(),
            run.num_labels,
            run.corruption_rate,
            run.seed,
            epoch,
            settings.batch_size,
        )
        given[row, order[row]] = seen.to(order.device)
        is_labelled[row, order[row]] = is_seen.to(order.device)
    return given, is_labelled


def begin(
    initial: Initial,
    runs: Sequence[RunSpec],
    settings: Settings,
    device: str,
    dtype: torch.dtype,
    state: Mapping[str, Any] | None,
) -> Ensemble:
    """Runs before their first epoch, or where ``state`` left them."""
    weights = initial([run.seed for run in runs]) if state is None else state["parameters"]
    parameters = {name: w.to(device, dtype).requires_grad_() for name, w in weights.items()}
    # Adam works element by element, so one of it over [R, ...] is one of its own for every run.
    optimizer = torch.optim.Adam(parameters.values(), lr=settings.lr, fused=True)
    if state is None:
        return Ensemble(parameters=parameters, optimizer=optimizer)
    optimizer.load_state_dict(state["optimizer"])
    return Ensemble(
        parameters=parameters,
        optimizer=optimizer,
        epoch=state["epoch"],
        objectives=[list(row) for row in state["objectives"]],
        failures={int(run): Failure(*failure) for run, failure in state["failures"].items()},
    )


def end_epoch(
    ensemble: Ensemble, objectives: list[float], runs: Sequence[RunSpec], initial: Initial
) -> None:
    """Record the epoch, and stop runs whose numbers are no longer finite."""
    ensemble.epoch += 1
    ensemble.objectives.append(objectives)
    leaves = [leaf.detach().flatten(1) for leaf in ensemble.parameters.values()]
    is_finite = torch.stack([leaf.isfinite().all(1) for leaf in leaves]).all(0).tolist()
    for row, value in enumerate(objectives):
        if not (math.isfinite(value) and is_finite[row]):
            ensemble.failures.setdefault(row, _failure(ensemble, row, value))
            _reset(ensemble, row, initial([runs[row].seed]))


def _failure(ensemble: Ensemble, row: int, objective: float) -> Failure:
    """What is not finite in a run: its objective, or a weight that the last step has spoilt."""
    if not math.isfinite(objective):
        return Failure(ensemble.epoch, objective)
    for name, leaf in ensemble.parameters.items():
        weights = leaf[row].detach()
        if len(found := weights[~weights.isfinite()]):
            return Failure(ensemble.epoch, found[0].item(), name)
    raise AssertionError("all weights are finite")


def _reset(ensemble: Ensemble, row: int, first: Parameters) -> None:
    """Reset one run to its initial weights and an empty optimizer state."""
    with torch.no_grad():
        for name, leaf in ensemble.parameters.items():
            leaf[row] = first[name][0].to(leaf)
            memory = ensemble.optimizer.state[leaf]
            memory["exp_avg"][row] = 0
            memory["exp_avg_sq"][row] = 0


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
