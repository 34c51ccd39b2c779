"""How far the probability of the predicted class is from how often it is right."""

from __future__ import annotations

import torch
from torch import Tensor


def calibration_error(probabilities: Tensor, labels: Tensor, num_bins: int = 15) -> Tensor:
    """The expected calibration error of every run, float64 [R], between 0 and 1.

    ``probabilities`` [R, n, C], ``labels`` int64 [n]. The n largest probabilities fall into
    ``num_bins`` bins ((m - 1)/M, m/M] of equal width; the error is the mean over images of
    |accuracy - confidence| of the image's bin (Guo et al. 2017, equation 3). A run with a
    probability that is not a number has the error NaN.
    """
    confidence, predicted = probabilities.double().max(dim=-1)
    gap = (predicted == labels).double() - confidence
    edges = torch.arange(1, num_bins, dtype=torch.float64, device=gap.device) / num_bins
    # Of equal values bucketize takes the lower bin: the bins are closed on the right.
    bins = torch.bucketize(confidence, edges)
    # Size of a bin × |accuracy - confidence| in it = |sum of the gaps in it|.
    sums = gap.new_zeros(gap.shape[0], num_bins).scatter_add(1, bins, gap)
    return sums.abs().sum(dim=1) / gap.shape[1]
