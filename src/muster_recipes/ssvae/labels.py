"""Which images are labelled, and with what: fixed and balanced, or drawn anew every epoch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from muster import UsageError, seed_of
from muster_recipes.digits.files import NUM_CLASSES
from muster_recipes.ssvae.dataset import refuse_missing


@dataclass(frozen=True)
class Labelled:
    """``index`` [M] into the pool, the labels that training sees, and the true ones; int64."""

    index: Tensor
    given: Tensor
    true: Tensor


def choose_labels(labels: Tensor, num_labels: int, corruption_rate: float, seed: int) -> Labelled:
    """A fixed labelled subset of a pool whose true labels are ``labels`` [n].

    The numbers of labels per class differ by at most 1. round(corruption_rate · num_labels) of
    them are wrong, each uniform over the other classes, drawn once. With one seed, the subset of
    a smaller ``num_labels`` is part of that of a larger one, and so are the flipped labels of a
    smaller ``corruption_rate``, to the same wrong class. UsageError when a class has too few
    images.
    """
    stream = torch.Generator().manual_seed(seed_of("ssvae-labels", seed))
    order = _balanced_order(labels, stream)
    if num_labels > len(order):
        counts = torch.bincount(labels, minlength=NUM_CLASSES).tolist()
        refuse_missing(counts, f"--n-labels {num_labels}")
        raise UsageError(
            f"--n-labels {num_labels}: only {len(order)} labels can be chosen with equal numbers "
            f"per class from a pool of {len(labels)} images.",
            hint=f"write {len(order)} or less.",
        )
    # For every image, whether chosen or not: no draw depends on the number of labels.
    offset = torch.randint(1, NUM_CLASSES, (len(labels),), generator=stream)
    rank = torch.rand(len(labels), generator=stream, dtype=torch.float64)
    index = order[:num_labels]
    true = labels[index]
    num_flipped = round(corruption_rate * num_labels)
    flipped = rank[index].argsort(stable=True)[:num_flipped]
    given = true.clone()
    given[flipped] = (true[flipped] + offset[index[flipped]]) % NUM_CLASSES
    return Labelled(index, given, true)


def labels_of_epoch(
    labels: Tensor,
    num_labels: int,
    corruption_rate: float,
    seed: int,
    epoch: int,
    batch_size: int,
) -> tuple[Tensor, Tensor]:
    """The older protocol, in the order of an epoch's batches: (given [n], is_labelled [n]).

    ``labels`` [n] are the true labels in the order of this epoch. Every batch is labelled as a
    whole or not at all, with probability num_labels / n, and every label is wrong with
    probability ``corruption_rate``; both are drawn anew for each (seed, epoch). So an epoch sees
    ``num_labels`` labels only on average, and over the epochs nearly every image is labelled.
    """
    stream = torch.Generator().manual_seed(seed_of("ssvae-per-batch", seed, epoch))
    count = len(labels)
    num_batches = -(-count // batch_size)
    whole = torch.rand(num_batches, generator=stream) < num_labels / count
    is_labelled = whole.repeat_interleave(batch_size)[:count]
    is_wrong = torch.rand(count, generator=stream) < corruption_rate
    offset = torch.randint(1, NUM_CLASSES, (count,), generator=stream)
    given = torch.where(is_wrong, (labels + offset) % NUM_CLASSES, labels)
    return given, is_labelled


def _balanced_order(labels: Tensor, stream: torch.Generator) -> Tensor:
    """Images in rounds of one per class, as long as every class has one left.

    However many are taken from its beginning, they are balanced. The order of the classes is drawn
    as well, so that the seed decides which classes have one label more.
    """
    queues = []
    for label in torch.randperm(NUM_CLASSES, generator=stream).tolist():
        members = (labels == label).nonzero()[:, 0]
        queues.append(members[torch.randperm(len(members), generator=stream)])
    rounds = min(map(len, queues))
    return torch.stack([queue[:rounds] for queue in queues], 1).flatten()
