"""Windows of inertial signals, and their splits by subject."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from muster import UsageError

#: In the order of the input's channels; the names are those of the UCI-HAR files.
CHANNELS = tuple(
    f"{sensor}_{axis}" for sensor in ("body_acc", "body_gyro", "total_acc") for axis in "xyz"
)
CLASSES = ("walking", "upstairs", "downstairs", "sitting", "standing", "laying")
NUM_STEPS = 128

Mode = Literal["stack", "flatten", "average", "first"]


@dataclass(frozen=True)
class Windows:
    """``signals``: float32 [n, 9, 128]. ``labels`` (0 to 5) and ``subjects``: int64 [n]."""

    signals: NDArray[np.float32]
    labels: NDArray[np.int64]
    subjects: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)

    def of(self, chosen: NDArray[np.bool_]) -> Windows:
        """The chosen windows, in order."""
        return Windows(self.signals[chosen], self.labels[chosen], self.subjects[chosen])


def split_by_subject(windows: Windows, share: float, seed: int) -> tuple[Windows, Windows]:
    """Divide windows by subject into the rest and about ``share``, each of one subject at least."""
    subjects = np.unique(windows.subjects)
    if len(subjects) < 2:
        raise UsageError(
            f"All {len(windows)} training windows are of "
            f"{len(subjects)} subject{'s' * (len(subjects) != 1)}; at least 2 are needed, because "
            "training and validation never share a subject."
        )
    num_chosen = min(len(subjects) - 1, max(1, round(share * len(subjects))))
    chosen = np.random.default_rng(seed).permutation(subjects)[:num_chosen]
    is_chosen = np.isin(windows.subjects, chosen)
    return windows.of(~is_chosen), windows.of(is_chosen)


def moments(windows: Windows) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each channel, [9, 1]."""
    mean = windows.signals.mean((0, 2), dtype=np.float64)
    std = windows.signals.std((0, 2), dtype=np.float64)
    return (
        torch.from_numpy(mean).float()[:, None],
        torch.from_numpy(std).float().clamp_min(1e-6)[:, None],
    )


def num_inputs(mode: Mode) -> int:
    """Channels of an item's signal."""
    return len(CHANNELS) if mode == "stack" else 1


class WindowSet(Dataset[tuple[Tensor, Tensor, int]]):
    """Items: standardised signal [channels, 128], label, number of its window.

    ``flatten`` has nine items per window, one after the other; the other modes have one.
    """

    def __init__(self, windows: Windows, mean: Tensor, std: Tensor, mode: Mode) -> None:
        self._signals = (torch.from_numpy(windows.signals) - mean) / std
        self._labels = torch.from_numpy(windows.labels)
        self._mode = mode

    def __len__(self) -> int:
        per_window = len(CHANNELS) if self._mode == "flatten" else 1
        return per_window * len(self._labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        window, signal = index, self._signals
        match self._mode:
            case "flatten":
                window, channel = divmod(index, len(CHANNELS))
                item = signal[window, channel : channel + 1]
            case "average":
                item = signal[window].mean(0, keepdim=True)
            case "first":
                item = signal[window, :1]
            case "stack":
                item = signal[window]
        return item, self._labels[window], window
