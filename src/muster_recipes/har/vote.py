"""From predictions of channels to predictions of windows."""

from __future__ import annotations

import torch
from torch import Tensor


def vote(windows: Tensor, log_probs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Mean log-probabilities [w, classes] and labels [w] of the different ``windows``.

    Sorted by window; float64, so that the order of the samples does not matter to a vote. A sample
    appears once in a data set's columns, whatever the number of ranks, so each counts once.
    """
    numbers, where = torch.unique(windows, return_inverse=True)
    sums = torch.zeros(len(numbers), log_probs.shape[1], dtype=torch.float64)
    sums.index_add_(0, where, log_probs.double())
    counts = torch.bincount(where, minlength=len(numbers))
    window_labels = torch.empty(len(numbers), dtype=labels.dtype)
    window_labels[where] = labels  # all samples of a window have its label
    return sums / counts[:, None], window_labels


def confusion(labels: Tensor, guesses: Tensor, num_classes: int) -> Tensor:
    """[true class, guessed class] counts."""
    pairs = labels * num_classes + guesses
    return torch.bincount(pairs, minlength=num_classes**2).view(num_classes, num_classes)
