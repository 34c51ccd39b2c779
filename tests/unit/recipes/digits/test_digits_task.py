"""The task: data, splits, shapes, scores, and a training that reaches the aim."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.unit.recipes.digits.published_files import write_cifar, write_mnist
from torch.utils.data import DataLoader

from muster import UsageError
from muster.train.config import TrainConfig
from muster_recipes.digits.config import DigitsConfig
from muster_recipes.digits.images import Images, embedded_digits, load, shifted, split
from muster_recipes.digits.task import DigitsTask


def test_the_embedded_digits_are_the_published_ones() -> None:
    images = embedded_digits()
    assert images.pixels.shape == (1797, 1, 8, 8)
    assert images.pixels.dtype == torch.uint8
    assert int(images.pixels.max()) == 16
    # Counts per class as the data set's description gives them.
    counts = [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert torch.bincount(images.labels).tolist() == counts
    assert images.pixels[0, 0, 0].tolist() == [0, 0, 5, 13, 9, 1, 0, 0]


def test_splits_are_disjoint_complete_and_stratified() -> None:
    numbered = Images(torch.arange(1797)[:, None], embedded_digits().labels)
    rest, chosen = split(numbered, 0.2, 3)
    both = torch.cat([rest.pixels, chosen.pixels])[:, 0]
    assert sorted(both.tolist()) == list(range(1797))
    shares = torch.bincount(chosen.labels) / torch.bincount(numbered.labels)
    assert bool(((shares - 0.2).abs() < 0.01).all())


def test_splits_depend_on_their_seed_only() -> None:
    first, again = load(DigitsConfig()), load(DigitsConfig(model="mlp"))
    other = load(DigitsConfig(split_seed=1))
    for name in ("train", "val", "test"):
        assert torch.equal(first[name].pixels, again[name].pixels)
    assert not torch.equal(first["test"].labels, other["test"].labels)
    assert [len(first[name].labels) for name in ("train", "val", "test")] == [1295, 143, 359]


@pytest.mark.parametrize(
    ("down", "right", "rows"),
    [
        (0, 0, [[1, 2], [3, 4]]),
        (1, 0, [[0, 0], [1, 2]]),
        (0, -1, [[2, 0], [4, 0]]),
        (-1, 1, [[0, 3], [0, 0]]),
        (2, 0, [[0, 0], [0, 0]]),
    ],
)
def test_a_shift_moves_and_fills_with_zeros(down: int, right: int, rows: list[list[int]]) -> None:
    assert shifted(torch.tensor([[[1, 2], [3, 4]]]), down, right).tolist() == [rows]


def test_only_training_images_vary() -> None:
    task = DigitsTask(DigitsConfig())
    train, test = task.dataset("train"), task.dataset("test")
    torch.manual_seed(0)
    assert len({str(train[0][0].tolist()) for _ in range(30)}) > 3
    assert torch.equal(test[0][0], test[0][0])
    plain = DigitsTask(DigitsConfig(augment=False)).dataset("train")
    values = torch.stack([plain[i][0] for i in range(len(plain))])
    assert float(values.mean()) == pytest.approx(0, abs=1e-4)
    assert float(values.std()) == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("model", ["cnn", "mlp"])
@pytest.mark.parametrize("dataset", ["digits", "mnist", "fashion-mnist", "cifar10"])
def test_every_set_and_model_train(tmp_path: Path, dataset: str, model: str) -> None:
    if dataset == "cifar10":
        write_cifar(tmp_path)
    else:
        write_mnist(tmp_path, packed=True)
    config = DigitsConfig(
        dataset=dataset,  # type: ignore[arg-type]
        model=model,  # type: ignore[arg-type]
        data_dir=None if dataset == "digits" else tmp_path,
        width=8,
    )
    task = DigitsTask(config)
    net = task.model()
    batch = next(iter(DataLoader(task.dataset("train"), 6)))
    losses = task.loss(net, batch)
    assert losses.shape == (6,)
    losses.mean().backward()
    assert all(parameter.grad is not None for parameter in net.parameters())
    with torch.no_grad():
        columns = task.score(net, batch)
    assert all(len(values) == 6 for values in columns.values())
    assert task.summarise(columns)["data"] == dataset


def test_metrics_are_counted_over_all_samples() -> None:
    columns = {
        "loss": torch.tensor([1.0, 2.0, 3.0, 6.0]),
        "label": torch.tensor([0, 0, 1, 9]),
        "guess": torch.tensor([0, 1, 1, 9]),
    }
    metrics = DigitsTask(DigitsConfig()).summarise(columns)
    assert metrics["loss"] == 3.0
    assert metrics["accuracy"] == 0.75
    assert metrics["class_accuracy"] == [0.5, 1.0, *[None] * 7, 1.0]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Small tensors are slower on several threads, and much so on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.thorough
def test_the_defaults_reach_the_aim() -> None:
    """A plain loop over the task with its own defaults: test accuracy of 98 % and more."""
    task = DigitsTask(DigitsConfig())
    config = TrainConfig.of(task.defaults)
    assert config.lr is not None
    torch.manual_seed(0)
    model = task.model()
    optimizer = task.optimizer(model, config.lr, config.weight_decay)
    loader = DataLoader(task.dataset("train"), config.global_batch, shuffle=True)
    num_steps, step = config.epochs * len(loader), 0
    for _ in range(config.epochs):
        for batch in loader:
            share = step / num_steps
            optimizer.param_groups[0]["lr"] = config.lr * (1 + math.cos(math.pi * share)) / 2
            optimizer.zero_grad()
            task.loss(model, batch).mean().backward()
            optimizer.step()
            step += 1
    model.eval()
    with torch.no_grad():
        parts = [task.score(model, batch) for batch in DataLoader(task.dataset("test"), 50)]
    metrics = task.summarise({k: torch.cat([part[k] for part in parts]) for k in parts[0]})
    assert metrics["accuracy"] >= 0.98


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dataset": "mnist"}, "--data-dir is not given"),
        ({"data_dir": Path("x")}, "--data-dir x has no effect"),
        ({"width": 12}, "--width 12 must be a multiple of 8"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(
    changes: dict[str, object], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        DigitsConfig(**changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("recipe", ["digits", "har", "arith"])
def test_the_flags_are_read_without_torch(recipe: str) -> None:
    code = (
        f"import sys, muster_recipes.{recipe}.config as c\n"
        "from muster.train.config import TrainConfig\n"
        "TrainConfig.of(c.RECIPE.defaults)\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
