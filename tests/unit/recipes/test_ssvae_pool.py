"""Pools from IDX files in the published format, whole and damaged, and from the package."""

from __future__ import annotations

import dataclasses
import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.recipes.digits.published_files import PARTS, idx_images, idx_labels, write_mnist

from muster import SetupError, UsageError
from muster_recipes.ssvae import dataset, pool
from muster_recipes.ssvae.config import SsvaeConfig
from muster_recipes.ssvae.labels import choose_labels
from muster_recipes.ssvae.plan import forecast


@pytest.mark.parametrize(
    "name", ["MNIST", "mnist", "FashionMNIST", "fashion_mnist", "Fashion-Mnist", "DIGITS"]
)
def test_a_data_set_is_named_in_any_spelling(name: str) -> None:
    plain = name.lower().replace("_", "").replace("-", "")
    assert dataset.canonical(name).replace("-", "") == plain


def test_an_unknown_data_set_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError) as caught:
        SsvaeConfig(dataset="cifar10")
    assert "--dataset cifar10 is not known." in str(caught.value)
    assert "digits, mnist, fashion-mnist" in str(caught.value)


def test_the_embedded_digits_are_split_into_disjoint_parts_within_0_and_1() -> None:
    parts = pool.load("digits")
    assert {name: len(part.labels) for name, part in parts.items()} == {
        "train": 1295, "val": 143, "test": 359,
    }  # fmt: skip
    every = torch.cat([part.x for part in parts.values()])
    assert every.shape == (1797, 64) and every.dtype == torch.float32
    assert float(every.min()) == 0.0 and float(every.max()) == 1.0
    assert len(every.unique(dim=0)) == len(every)  # no image is in two parts
    again, other = pool.load("digits", split_seed=0), pool.load("digits", split_seed=1)
    assert torch.equal(parts["test"].x, again["test"].x)
    assert not torch.equal(parts["test"].x, other["test"].x)


@pytest.mark.parametrize("packed", [False, True])
def test_idx_files_are_read_plain_and_packed(tmp_path: Path, packed: bool) -> None:
    written = write_mnist(tmp_path, packed=packed)
    parts = pool.load("MNIST", tmp_path)
    pixels, labels = written["t10k"]
    assert torch.equal(parts["test"].labels, torch.from_numpy(labels.astype(np.int64)))
    assert torch.allclose(parts["test"].x * 255, torch.from_numpy(pixels).flatten(1).float())
    assert len(parts["train"].labels) + len(parts["val"].labels) == len(written["train"][1])
    assert parts["train"].x.shape[1] == 784


@pytest.mark.parametrize("name", ["digits", "mnist"])
def test_as_many_labels_are_allowed_as_the_pool_can_give(tmp_path: Path, name: str) -> None:
    write_mnist(tmp_path, packed=False)
    folder = None if name == "digits" else tmp_path
    source = dataset.check_source(name, folder)
    assert source is not None
    most = source.most_labels
    train = pool.load(name, folder)["train"]
    assert train.size == (source.height, source.width)
    labels = pool.load(name, folder)["train"].labels
    assert most == 10 * int(torch.bincount(labels, minlength=10).min())
    choose_labels(labels, most, 0.0, 42)
    forecast(SsvaeConfig(dataset=name, data_dir=folder, n_labels=(most,)))
    with pytest.raises(UsageError) as caught:
        forecast(SsvaeConfig(dataset=name, data_dir=folder, n_labels=(1, most + 1)))
    assert f"--n-labels {most + 1}" in str(caught.value)
    assert f"write {most} or less" in str(caught.value)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def _cut_packed(path: Path) -> None:
    packed = gzip.compress(path.read_bytes())
    path.unlink()
    path.with_name(f"{path.name}.gz").write_bytes(packed[: len(packed) // 2])


def _page(path: Path) -> None:
    path.write_bytes(b"<html>404 Not Found</html>")


def _fewer(path: Path) -> None:
    path.with_name("train-labels-idx1-ubyte").write_bytes(idx_labels(np.zeros(29)))


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (_cut, "header announces"),
        (_cut_packed, "cannot be unpacked"),
        (_page, "begins with 3c 68 74 6d instead of 00 00 08 03"),
        (_fewer, "has 30 images, but train-labels-idx1-ubyte has 29 labels"),
        (Path.unlink, "does not exist"),
    ],
)
def test_damaged_files_are_told_before_anything_runs(
    tmp_path: Path, damage: object, text: str
) -> None:
    write_mnist(tmp_path, packed=False)
    damage(tmp_path / "train-images-idx3-ubyte")  # type: ignore[operator]
    with pytest.raises(UsageError) as caught:
        forecast(SsvaeConfig(dataset="mnist", data_dir=tmp_path, n_labels=(10,)))
    assert text in str(caught.value)


@pytest.mark.parametrize("given", [{"n_labels": (10,)}, {}])
def test_a_folder_without_files_says_both_ways(tmp_path: Path, given: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        forecast(SsvaeConfig(dataset="mnist", data_dir=tmp_path, **given))
    text = str(caught.value)
    assert f"--data-dir {tmp_path} does not exist or holds no IDX file" in text
    assert "four published IDX files" in text and "muster-gpu[datasets]" in text


def test_a_class_without_images_is_named(tmp_path: Path) -> None:
    write_mnist(tmp_path, packed=False)
    labels = np.arange(30) % 8  # neither 8 nor 9
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx_labels(labels))
    with pytest.raises(UsageError, match="no training image of class 8, 9 is left"):
        forecast(SsvaeConfig(dataset="mnist", data_dir=tmp_path, n_labels=(10,)))
    with pytest.raises(UsageError, match="no training image of class 8, 9 is left"):
        choose_labels(torch.from_numpy(labels), 10, 0.0, 42)  # as from the hub


@pytest.mark.parametrize("shape", [(8, 10), (8, 18)])  # 80 pixels; 144, which a square has, too
def test_scores_of_images_that_are_not_square_are_refused_at_the_start(
    tmp_path: Path, shape: tuple[int, int]
) -> None:
    write_mnist(tmp_path, packed=False)
    for part, count in PARTS.items():
        pixels = np.zeros((count, *shape))
        (tmp_path / f"{part}-images-idx3-ubyte").write_bytes(idx_images(pixels))
    config = SsvaeConfig(dataset="mnist", data_dir=tmp_path, n_labels=(10,))
    assert forecast(config) == []
    with pytest.raises(UsageError, match=f"of mnist are {shape[0]}x{shape[1]}"):
        forecast(dataclasses.replace(config, factor_scores=True))


def test_a_folder_beside_the_embedded_digits_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        SsvaeConfig(data_dir=tmp_path)
    assert "has no effect" in str(caught.value)


def test_a_set_that_cannot_be_fetched_says_both_ways(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets  # type: ignore[import-untyped]

    # The hub as an unplugged machine sees it: an empty cache and no network.
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(SetupError) as caught:
        pool.load("fashion_mnist")
    text = str(caught.value)
    assert "zalando-datasets/fashion_mnist" in text
    assert "--data-dir FOLDER" in text and "pip install 'muster-gpu[datasets]'" in text


def test_a_set_of_the_hub_is_read_as_its_files_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    written = write_mnist(tmp_path, packed=False)
    # Rows as the hub has them: an image, stored as PNG, and the name of its class as a number.
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(num_classes=10)}
    )
    parts = {
        part: datasets.Dataset.from_dict(
            {"image": list(pixels), "label": labels.tolist()}, features=features
        )
        for part, (pixels, labels) in zip(("train", "test"), written.values(), strict=True)
    }
    asked = []
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets, "load_dataset", lambda name: asked.append(name) or parts)
    from_hub, from_files = pool.load("mnist"), pool.load("mnist", tmp_path)
    assert asked == ["ylecun/mnist"]
    for part, read in from_files.items():
        assert torch.equal(from_hub[part].x, read.x)
        assert torch.equal(from_hub[part].labels, read.labels)
