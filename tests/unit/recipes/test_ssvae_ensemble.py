"""An ensemble is its runs, each trained alone; a plain loop for one run is the reference."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
import torch

from muster_recipes.ssvae.config import Hyper
from muster_recipes.ssvae.ensemble import (
    Ensemble,
    RunSpec,
    Settings,
    batches_of_epoch,
    epoch_orders,
    known_labels,
    train_ensemble,
    train_supervised,
)
from muster_recipes.ssvae.labels import choose_labels
from muster_recipes.ssvae.networks import class_logits, init_parameters
from muster_recipes.ssvae.noise import step_noise
from muster_recipes.ssvae.objective import objective
from muster_recipes.ssvae.pool import Pool, load

pytestmark = pytest.mark.thorough

HYPER = Hyper(num_pixels=64, num_style=3, num_hidden=12, num_samples=2)
SAMPLED = Hyper(num_pixels=64, num_style=3, num_hidden=12, num_samples=2, unlabelled="sampled")
SETTINGS = Settings(num_epochs=3, batch_size=32, lr=1e-2, eval_frequency=2)
RUNS = (
    RunSpec(seed=42, num_labels=20, alpha=5.0, corruption_rate=0.0),
    RunSpec(seed=42, num_labels=35, alpha=50.0, corruption_rate=0.4),
    RunSpec(seed=7, num_labels=20, alpha=1.0, corruption_rate=0.2),
)


@pytest.fixture(scope="module")
def pool() -> Pool:
    """75 images: the last of three batches is a smaller one."""
    train = load("digits")["train"]
    chosen = torch.cat([(train.labels == k).nonzero()[: 7 + k % 2, 0] for k in range(10)])
    return Pool(train.x[chosen], train.labels[chosen])


def values(ensemble: Ensemble, row: int) -> dict[str, torch.Tensor]:
    return {name: value[row].detach().clone() for name, value in ensemble.parameters.items()}


class PlainAdam:
    """Kingma and Ba (2015), algorithm 1, in the order in which it is printed."""

    def __init__(self, lr: float) -> None:
        self.lr, self.step_number = lr, 0
        self.first: dict[str, torch.Tensor] = {}
        self.second: dict[str, torch.Tensor] = {}

    def step(self, parameters: dict[str, torch.Tensor], gradients: dict[str, torch.Tensor]) -> None:
        self.step_number += 1
        t = self.step_number
        for name, gradient in gradients.items():
            zero = torch.zeros_like(gradient)
            self.first[name] = 0.9 * self.first.get(name, zero) + 0.1 * gradient
            self.second[name] = 0.999 * self.second.get(name, zero) + 0.001 * gradient**2
            m_hat = self.first[name] / (1 - 0.9**t)
            v_hat = self.second[name] / (1 - 0.999**t)
            parameters[name] = parameters[name] - self.lr * m_hat / (v_hat.sqrt() + 1e-8)


def trained_plainly(pool: Pool, run: RunSpec, hyper: Hyper) -> dict[str, torch.Tensor]:
    """One run, image by image into batches, float64."""
    weights = {k: v.double() for k, v in init_parameters(hyper, [run.seed]).items()}
    chosen = choose_labels(pool.labels, run.num_labels, run.corruption_rate, run.seed)
    known = dict(zip(chosen.index.tolist(), chosen.given.tolist(), strict=True))
    adam, step = PlainAdam(SETTINGS.lr), 0
    for epoch in range(SETTINGS.num_epochs):
        order = epoch_orders(len(pool.labels), [run], epoch)[0].tolist()
        while order:
            batch, order = order[:32], order[32:]
            leaves = {name: w.clone().requires_grad_() for name, w in weights.items()}
            terms = objective(
                leaves,
                pool.x[batch].double()[None],
                torch.tensor([[known.get(i, 0) for i in batch]]),
                torch.tensor([[i in known for i in batch]]),
                torch.tensor([run.alpha], dtype=torch.float64),
                step_noise(hyper, [run.seed], step, len(batch), "cpu"),
                hyper,
            )
            loss = -terms.objective.sum() / len(batch)
            gradients = torch.autograd.grad(loss, list(leaves.values()))
            adam.step(weights, dict(zip(leaves, gradients, strict=True)))
            step += 1
    return {name: value[0] for name, value in weights.items()}


@pytest.mark.parametrize("hyper", [HYPER, SAMPLED], ids=["exact", "sampled"])
def test_every_run_of_an_ensemble_equals_a_plain_loop_over_it_alone(
    pool: Pool, hyper: Hyper
) -> None:
    ensemble = train_ensemble(pool, RUNS, hyper, SETTINGS, dtype=torch.float64)
    for row, run in enumerate(RUNS):
        expected = trained_plainly(pool, run, hyper)
        for name, value in values(ensemble, row).items():
            torch.testing.assert_close(value, expected[name], rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("protocol", ["fixed", "per-batch"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-4), (torch.float64, 1e-9)], ids=["32", "64"]
)
def test_a_run_does_not_depend_on_its_ensemble(
    pool: Pool, protocol: str, dtype: torch.dtype, tolerance: float
) -> None:
    settings = Settings(
        num_epochs=2, batch_size=32, lr=1e-3, eval_frequency=1, label_protocol=protocol
    )
    together = train_ensemble(pool, RUNS, HYPER, settings, dtype=dtype)
    for row, run in enumerate(RUNS):
        alone = train_ensemble(pool, [run], HYPER, settings, dtype=dtype)
        for name, value in values(together, row).items():
            torch.testing.assert_close(
                value, alone.parameters[name][0].detach(), rtol=tolerance, atol=tolerance
            )
        for both, one in zip(together.objectives, alone.objectives, strict=True):
            assert both[row] == pytest.approx(one[0], rel=tolerance)


def test_a_run_that_fails_leaves_every_bit_of_the_others(pool: Pool) -> None:
    ill = RunSpec(seed=42, num_labels=20, alpha=1e38, corruption_rate=0.0)
    good = train_ensemble(pool, [RUNS[0], RUNS[1], RUNS[2]], HYPER, SETTINGS)
    bad = train_ensemble(pool, [RUNS[0], ill, RUNS[2]], HYPER, SETTINGS)
    assert good.failures == {}
    assert list(bad.failures) == [1]
    assert bad.failures[1].epoch == 1 and not math.isfinite(bad.failures[1].value)
    for row in (0, 2):
        one, other = values(good, row), values(bad, row)
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert [row[0] for row in good.objectives] == [row[0] for row in bad.objectives]


def test_a_run_that_fails_is_put_back_to_its_first_weights(pool: Pool) -> None:
    wild = Settings(num_epochs=2, batch_size=32, lr=1e18, eval_frequency=1)
    ensemble = train_ensemble(pool, RUNS[:2], HYPER, wild)
    assert [failure.epoch for failure in ensemble.failures.values()] == [1, 1]
    first = init_parameters(HYPER, [run.seed for run in RUNS[:2]])
    for name, value in ensemble.parameters.items():
        assert torch.equal(value.detach(), first[name])


def test_every_image_is_seen_once_per_epoch_in_an_order_of_seed_and_epoch() -> None:
    first, second = (epoch_orders(50, RUNS, epoch) for epoch in (0, 1))
    for order in (*first, *second):
        assert order.sort().values.tolist() == list(range(50))
    assert torch.equal(first[0], first[1])  # the same seed
    assert not torch.equal(first[0], first[2])
    assert not torch.equal(first[0], second[0])


def test_a_run_knows_the_labels_that_were_chosen_and_no_others(pool: Pool) -> None:
    given, is_labelled = known_labels(pool.labels, RUNS, SETTINGS)
    for row, run in enumerate(RUNS):
        chosen = choose_labels(pool.labels, run.num_labels, run.corruption_rate, run.seed)
        assert is_labelled[row].nonzero()[:, 0].tolist() == sorted(chosen.index.tolist())
        assert torch.equal(given[row, chosen.index], chosen.given)


@pytest.mark.parametrize("train", [train_ensemble, train_supervised])
def test_a_stopped_ensemble_goes_on_to_the_same_bits(pool: Pool, train: Any) -> None:
    runs = [RUNS[0], RunSpec(seed=1, num_labels=20, alpha=2.0, corruption_rate=0.5)]
    saved: list[bytes] = []

    def save(ensemble: Ensemble) -> None:
        if ensemble.epoch == 2:
            buffer = io.BytesIO()
            torch.save(ensemble.state(), buffer)
            saved.append(buffer.getvalue())

    whole = train(pool, runs, HYPER, SETTINGS, "cpu", save)
    state = torch.load(io.BytesIO(saved[0]), weights_only=True)
    resumed = train(pool, runs, HYPER, SETTINGS, "cpu", state=state)
    assert resumed.epoch == whole.epoch == 3
    assert resumed.objectives == whole.objectives
    for name, value in whole.parameters.items():
        assert torch.equal(value, resumed.parameters[name])


def test_the_last_epoch_is_always_evaluated() -> None:
    settings = Settings(num_epochs=7, batch_size=1, lr=1.0, eval_frequency=3)
    assert [n for n in range(1, 8) if settings.is_evaluated(n)] == [3, 6, 7]


def test_training_raises_the_objective(pool: Pool) -> None:
    settings = Settings(num_epochs=25, batch_size=32, lr=3e-3, eval_frequency=25)
    ensemble = train_ensemble(pool, RUNS, SAMPLED, settings)
    for row in range(len(RUNS)):
        assert ensemble.objectives[-1][row] > ensemble.objectives[0][row] + 5


def test_the_baseline_equals_a_plain_loop_over_the_labelled_images(pool: Pool) -> None:
    runs = [RUNS[0], RUNS[2]]
    trained = train_supervised(pool, runs, HYPER, SETTINGS, dtype=torch.float64)
    assert sorted(trained.parameters) == [
        "classifier_bias", "classifier_weight", "encoder_bias", "encoder_weight",
    ]  # fmt: skip
    for row, run in enumerate(runs):
        chosen = choose_labels(pool.labels, run.num_labels, run.corruption_rate, run.seed)
        first = init_parameters(HYPER, [run.seed])
        weights = {name: first[name].double() for name in trained.parameters}
        adam = PlainAdam(SETTINGS.lr)
        for epoch in range(SETTINGS.num_epochs):
            for places in batches_of_epoch(run.num_labels, [run], SETTINGS, epoch, 3)[0]:
                leaves = {name: w.clone().requires_grad_() for name, w in weights.items()}
                x = pool.x[chosen.index[places]].double()[None]
                log_q = class_logits(leaves, x).logits[0].log_softmax(-1)
                right = log_q[range(len(places)), chosen.given[places]]
                gradients = torch.autograd.grad(-right.mean(), list(leaves.values()))
                adam.step(weights, dict(zip(leaves, gradients, strict=True)))
        assert adam.step_number == 9  # as many as the semi-supervised run takes
        for name, value in values(trained, row).items():
            torch.testing.assert_close(value, weights[name][0], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(("num_labels", "size"), [(20, 20), (32, 32), (100, 32)])
def test_a_batch_of_the_baseline_has_no_image_twice(num_labels: int, size: int) -> None:
    batches = batches_of_epoch(num_labels, RUNS, SETTINGS, 0, steps=11)
    assert batches.shape == (3, 11, size)
    for batch in batches.flatten(0, 1):
        assert len(set(batch.tolist())) == size
    if num_labels == 100:  # three batches per shuffle, disjoint
        assert len(set(batches[0, :3].flatten().tolist())) == 96
