"""Synthetic windows, splits by subject and modes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from muster_recipes.har.config import HarConfig
from muster_recipes.har.synthetic import make_windows
from muster_recipes.har.task import HarTask
from muster_recipes.har.windows import (
    Mode,
    Windows,
    WindowSet,
    moments,
    split_by_subject,
)

SMALL = {"synthetic_subjects": 5, "synthetic_windows": 12}


def test_synthetic_windows_have_the_shape_of_uci_har() -> None:
    train, test = make_windows(10, 12, 0)
    assert train.signals.shape == (7 * 12, 9, 128)
    assert train.signals.dtype == np.float32
    assert np.isfinite(train.signals).all()
    assert sorted(set(train.subjects.tolist())) == list(range(1, 8))
    assert sorted(set(test.subjects.tolist())) == [8, 9, 10]
    assert np.bincount(test.labels).tolist() == [6] * 6


def test_total_acceleration_is_the_bodys_with_gravity() -> None:
    train, _ = make_windows(5, 12, 0)
    gravity = train.signals[:, 6:] - train.signals[:, :3]
    # Constant over a window, and of about 1 g.
    assert np.ptp(gravity, axis=2).max() < 1e-5
    size = np.linalg.norm(gravity[:, :, 0], axis=1)
    assert abs(size - 1).max() < 0.2


def test_synthetic_windows_are_a_function_of_seed_and_subject() -> None:
    first, again, more = make_windows(5, 6, 1), make_windows(5, 6, 1), make_windows(9, 6, 1)
    assert (first[0].signals == again[0].signals).all()
    assert (first[0].signals == more[0].signals[: len(first[0])]).all()
    assert not (first[0].signals == make_windows(5, 6, 2)[0].signals).any()


@given(
    st.lists(st.integers(1, 30), min_size=2, max_size=80).filter(lambda x: len(set(x)) > 1),
    st.floats(0.01, 0.99),
    st.integers(0, 1000),
)
def test_a_split_never_cuts_a_subject(subjects: list[int], share: float, seed: int) -> None:
    n = len(subjects)
    signals = np.arange(n, dtype=np.float32)[:, None, None].repeat(9, 1)
    windows = Windows(signals, np.zeros(n, np.int64), np.array(subjects))
    rest, chosen = split_by_subject(windows, share, seed)
    assert not set(rest.subjects.tolist()) & set(chosen.subjects.tolist())
    assert len(rest) and len(chosen)
    both = np.concatenate([rest.signals, chosen.signals])[:, 0, 0]
    assert sorted(both.tolist()) == list(range(n))


def test_the_three_splits_share_no_subject() -> None:
    splits = HarTask(HarConfig()).splits
    subjects = {name: set(windows.subjects.tolist()) for name, windows in splits.items()}
    assert sum(map(len, subjects.values())) == len(set().union(*subjects.values())) == 30
    assert {name: len(found) for name, found in subjects.items()} == {
        "train": 17, "val": 4, "test": 9,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("mode", "channels", "per_window"),
    [("stack", 9, 1), ("flatten", 1, 9), ("average", 1, 1), ("first", 1, 1)],
)
def test_modes_give_what_they_say(mode: Mode, channels: int, per_window: int) -> None:
    windows, _ = make_windows(4, 6, 0)
    mean, std = moments(windows)
    signals = (torch.from_numpy(windows.signals) - mean) / std
    data = WindowSet(windows, mean, std, mode)
    assert len(data) == per_window * len(windows)
    for index in range(len(data)):
        signal, label, window = data[index]
        assert signal.shape == (channels, 128)
        assert window == index // per_window
        assert label == windows.labels[window]
        expected = {
            "stack": signals[window],
            "flatten": signals[window, index % 9][None],
            "average": signals[window].mean(0)[None],
            "first": signals[window, 0][None],
        }[mode]
        torch.testing.assert_close(signal, expected)


def test_training_windows_have_mean_0_and_deviation_1() -> None:
    task = HarTask(HarConfig(**SMALL))
    data = task.dataset("train")
    signals = torch.stack([data[i][0] for i in range(len(data))])
    torch.testing.assert_close(signals.mean((0, 2)), torch.zeros(9), atol=1e-5, rtol=0)
    torch.testing.assert_close(signals.std((0, 2)), torch.ones(9), atol=1e-3, rtol=0)
