"""Which images are labelled: balanced, nested, corrupted once and evenly."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples

from muster import UsageError
from muster_recipes.ssvae.labels import choose_labels, labels_of_epoch

NUM_CLASSES = 10
SEEDS = st.integers(0, 2**31)


def pool_labels(per_class: int, seed: int = 0) -> torch.Tensor:
    """Shuffled labels; class k has k images more than ``per_class``."""
    labels = torch.cat([torch.full((per_class + k,), k) for k in range(NUM_CLASSES)])
    return labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))]


LABELS = pool_labels(30)
MOST = 300


@examples(40)
@given(num=st.integers(1, MOST), rate=st.floats(0, 1), seed=SEEDS)
def test_a_subset_is_balanced_and_so_many_labels_are_wrong(
    num: int, rate: float, seed: int
) -> None:
    chosen = choose_labels(LABELS, num, rate, seed)
    assert len(chosen.index) == len(set(chosen.index.tolist())) == num
    assert torch.equal(chosen.true, LABELS[chosen.index])
    per_class = torch.bincount(chosen.true, minlength=NUM_CLASSES)
    assert per_class.max() - per_class.min() <= 1
    assert int((chosen.given != chosen.true).sum()) == round(rate * num)
    assert 0 <= int(chosen.given.min()) and int(chosen.given.max()) < NUM_CLASSES


@examples(40)
@given(nums=st.tuples(st.integers(1, MOST), st.integers(1, MOST)), seed=SEEDS)
def test_fewer_labels_are_part_of_more(nums: tuple[int, int], seed: int) -> None:
    few, many = (choose_labels(LABELS, num, 0.0, seed) for num in sorted(nums))
    assert set(few.index.tolist()) <= set(many.index.tolist())


@examples(40)
@given(num=st.integers(1, MOST), rates=st.tuples(st.floats(0, 1), st.floats(0, 1)), seed=SEEDS)
def test_a_wrong_label_stays_wrong_in_the_same_way_at_a_higher_rate(
    num: int, rates: tuple[float, float], seed: int
) -> None:
    low, high = (choose_labels(LABELS, num, rate, seed) for rate in sorted(rates))
    assert torch.equal(low.index, high.index)
    wrong = low.given != low.true
    assert torch.equal(low.given[wrong], high.given[wrong])


def test_a_seed_is_a_subset_and_other_seeds_are_others() -> None:
    one, again, other = (choose_labels(LABELS, 100, 0.2, seed) for seed in (42, 42, 43))
    assert torch.equal(one.index, again.index)
    assert torch.equal(one.given, again.given)
    assert set(one.index.tolist()) != set(other.index.tolist())


def test_wrong_labels_are_uniform_over_the_wrong_classes() -> None:
    # Every label wrong; 300 per pair of classes are expected. The chi-square statistic over 90
    # cells with 10 sums fixed has 80 degrees of freedom: above 124.8 with probability 0.001.
    labels = torch.arange(27_000) % NUM_CLASSES
    chosen = choose_labels(labels, 27_000, 1.0, seed=7)
    counts = torch.zeros(NUM_CLASSES, NUM_CLASSES)
    counts.index_put_((chosen.true, chosen.given), torch.tensor(1.0), accumulate=True)
    assert counts.diagonal().sum() == 0
    off = ~torch.eye(NUM_CLASSES, dtype=torch.bool)
    assert float((counts[off] - 300).square().sum() / 300) < 124.8


def test_which_labels_are_wrong_does_not_depend_on_the_class() -> None:
    # A fifth of 1,000 per class: the count of each is near 200 (standard deviation about 12).
    labels = torch.arange(10_000) % NUM_CLASSES
    chosen = choose_labels(labels, 10_000, 0.2, seed=3)
    per_class = torch.bincount(chosen.true[chosen.given != chosen.true], minlength=NUM_CLASSES)
    assert int(per_class.min()) > 150 and int(per_class.max()) < 250


def test_more_labels_than_there_are_equally_many_of_are_refused() -> None:
    assert len(choose_labels(LABELS, MOST, 0.0, 0).index) == MOST
    with pytest.raises(UsageError) as caught:
        choose_labels(LABELS, MOST + 1, 0.0, 0)
    assert "--n-labels 301: only 300 labels" in str(caught.value)


def test_the_older_protocol_labels_whole_batches_anew_in_every_epoch() -> None:
    labels = torch.arange(1_000) % NUM_CLASSES
    seen = []
    for epoch in range(400):
        known, is_labelled = labels_of_epoch(labels, 100, 0.2, 42, epoch, batch_size=128)
        for batch in is_labelled.split(128):
            assert bool(batch.all()) or not bool(batch.any())
        seen.append(int(is_labelled.sum()))
        wrong = float((known != labels).float().mean())
        assert 0.14 < wrong < 0.26  # five standard deviations of 0.0126
    assert min(seen) == 0 and max(seen) >= 384  # "100 labels" are none, or hundreds
    # Binomial: 8 batches, on average 12.5 of 125 images each; the mean of 400 within 5 sd.
    assert 75 < sum(seen) / len(seen) < 125
    assert len(set(seen)) > 3
