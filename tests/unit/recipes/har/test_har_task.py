"""The task: votes, metrics, losses, encoders, and a training on synthetic windows."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from muster import MissingPackageError, UsageError
from muster_recipes.har.config import HarConfig
from muster_recipes.har.task import HarTask, confusion, vote
from muster_recipes.har.windows import CLASSES

SMALL: dict[str, Any] = {"synthetic_subjects": 5, "synthetic_windows": 12, "width": 8}


@given(st.integers(1, 30), st.integers(0, 10**6))
def test_the_vote_is_the_brute_force_one(num_windows: int, seed: int) -> None:
    stream = torch.Generator().manual_seed(seed)
    n = 9 * num_windows
    windows = torch.arange(num_windows).repeat_interleave(9) * 3 + 5  # numbers with gaps
    truth = torch.randint(6, (num_windows,), generator=stream)
    labels = truth.repeat_interleave(9)
    log_probs = torch.randn(n, 6, generator=stream).log_softmax(1)
    order = torch.randperm(n, generator=stream)
    voted, window_labels = vote(windows[order], log_probs[order], labels[order])
    assert window_labels.tolist() == truth.tolist()
    for row in range(num_windows):
        expected = [
            sum(log_probs[9 * row + channel, k].item() for channel in range(9)) / 9
            for k in range(6)
        ]
        assert voted[row].tolist() == pytest.approx(expected, abs=1e-9)


def test_a_sure_channel_outvotes_unsure_ones() -> None:
    """Mean log-probability, not a count of heads."""
    probs = torch.tensor([[0.55, 0.45]] * 8 + [[0.001, 0.999]])
    voted, _ = vote(torch.zeros(9, dtype=torch.long), probs.log(), torch.ones(9, dtype=torch.long))
    assert voted.argmax(1).tolist() == [1]


def test_confusion_counts_truth_by_row() -> None:
    table = confusion(torch.tensor([0, 0, 1, 2]), torch.tensor([0, 2, 1, 0]), 3)
    assert table.tolist() == [[1, 0, 1], [0, 1, 0], [1, 0, 0]]


def test_flatten_reports_channels_and_windows_apart() -> None:
    # Window 0 (class 0): all channels right. Window 1 (class 1): five of nine right, but unsure.
    right, wrong = [0.95, 0.01, 0.01, 0.01, 0.01, 0.01], [0.9, 0.02, 0.02, 0.02, 0.02, 0.02]
    unsure = [0.25, 0.3, 0.1125, 0.1125, 0.1125, 0.1125]
    columns = {
        "log_probs": torch.tensor([right] * 9 + [unsure] * 5 + [wrong] * 4).log(),
        "label": torch.tensor([0] * 9 + [1] * 9),
        "window": torch.tensor([0] * 9 + [1] * 9),
    }
    metrics = HarTask(HarConfig(mode="flatten")).summarise(columns)
    assert metrics["channel_accuracy"] == pytest.approx(14 / 18)
    assert metrics["accuracy"] == 0.5
    assert metrics["class_accuracy"]["walking"] == 1.0
    assert metrics["class_accuracy"]["upstairs"] == 0.0
    assert metrics["class_accuracy"]["laying"] is None
    assert metrics["confusion"][1] == [1, 0, 0, 0, 0, 0]
    assert metrics["data"] == "synthetic"
    json.dumps(metrics)


@pytest.mark.parametrize("mode", ["stack", "flatten", "average", "first"])
def test_every_mode_has_losses_and_columns_per_sample(mode: Any) -> None:
    task = HarTask(HarConfig(mode=mode, **SMALL))
    model = task.model()
    batch = next(iter(DataLoader(task.dataset("train"), 7)))
    losses = task.loss(model, batch)
    assert losses.shape == (7,)
    losses.mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    with torch.no_grad():
        columns = task.score(model, batch)
    assert columns["log_probs"].shape == (7, len(CLASSES))
    metrics = task.summarise(columns)
    assert ("channel_accuracy" in metrics) == (mode == "flatten")


def test_label_smoothing_is_in_the_loss_and_not_in_the_metric() -> None:
    smooth, plain = (HarTask(HarConfig(label_smoothing=s, **SMALL)) for s in (0.1, 0.0))
    model = smooth.model().eval()
    batch = next(iter(DataLoader(smooth.dataset("val"), 12)))
    with torch.no_grad():
        log_probs = model(batch[0]).log_softmax(1)
        hard = -log_probs[torch.arange(12), batch[1]]
        torch.testing.assert_close(plain.loss(model, batch), hard)
        torch.testing.assert_close(smooth.loss(model, batch), 0.9 * hard - 0.1 * log_probs.mean(1))
        columns = smooth.score(model, batch)
    assert smooth.summarise(columns)["loss"] == pytest.approx(float(hard.mean()), rel=1e-5)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Small tensors are slower on several threads, and much so on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.thorough
def test_synthetic_windows_can_be_learnt_and_are_not_trivial() -> None:
    task = HarTask(HarConfig())
    torch.manual_seed(0)
    model = task.model()
    optimizer = task.optimizer(model, 2e-3, 1e-4)
    loader = DataLoader(task.dataset("train"), 64, shuffle=True)
    num_steps, step = 15 * len(loader), 0
    for _ in range(15):
        for batch in loader:
            rate = 2e-3 * min((step + 1) / 10, 0.5 * (1 + math.cos(math.pi * step / num_steps)))
            optimizer.param_groups[0]["lr"] = rate
            optimizer.zero_grad()
            task.loss(model, batch).mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step += 1
    model.eval()
    with torch.no_grad():
        parts = [task.score(model, batch) for batch in DataLoader(task.dataset("test"), 50)]
    metrics = task.summarise({k: torch.cat([part[k] for part in parts]) for k in parts[0]})
    assert 0.8 <= metrics["accuracy"] <= 0.995
    assert sum(map(sum, metrics["confusion"])) == 9 * 36


def vit_folder(folder: Path, kind: str = "vit") -> Path:
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    return folder


def test_a_vit_is_frozen_and_its_head_learns(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    shape = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        image_size=224, patch_size=56,
    )  # fmt: skip
    transformers.ViTModel(shape, add_pooling_layer=False).save_pretrained(tmp_path)
    task = HarTask(HarConfig(encoder="vit", encoder_path=tmp_path, **SMALL))
    model = task.model().train()
    batch = next(iter(DataLoader(task.dataset("train"), 3)))
    task.loss(model, batch).mean().backward()
    learns = {name for name, p in model.named_parameters() if p.grad is not None}
    assert learns == {"head.0.weight", "head.0.bias", "head.1.weight", "head.1.bias"}
    assert not any(module.training for module in model.get_submodule("encoder").modules())


def test_without_transformers_the_remedy_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    task = HarTask(HarConfig(encoder="vit", encoder_path=vit_folder(tmp_path), **SMALL))
    with pytest.raises(MissingPackageError, match=r"muster-gpu\[transformers\]"):
        task.model()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"label_smoothing": 1.0}, "--label-smoothing 1.0 is not from 0 to below 1"),
        ({"val_share": 0.0}, "--val-share 0.0 is not between 0 and 1"),
        ({"width": 4}, "--width 4 must be a multiple of 8"),
        ({"synthetic_subjects": 3}, "--synthetic-subjects 3 are too few"),
        ({"synthetic_windows": 5}, "leaves out some of the 6 classes"),
        ({"encoder": "vit"}, "--encoder vit needs --encoder-path"),
        ({"encoder_path": Path("x")}, "--encoder-path x has no effect with --encoder conv"),
        ({"encoder": "vit", "encoder_path": Path("/nowhere")}, "Cannot read /nowhere/config.json"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        HarConfig(**changes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"model_type": "bert"}', "holds a model of type 'bert', not 'vit'"),
        ("{}", "has no model_type"),
        ("[]", "has no model_type"),
        ("{", "has no model_type"),
    ],
)
def test_another_model_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UsageError, match=message):
        HarConfig(encoder="vit", encoder_path=tmp_path)
