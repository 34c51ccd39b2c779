"""Splits are consecutive, apart, of the same dates for all symbols, and episodes stay inside."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.examples import examples

from muster import UsageError
from muster_recipes.clstm_ppo.bars import Bars
from muster_recipes.clstm_ppo.config import ClstmPpoConfig
from muster_recipes.clstm_ppo.load import SPLITS, split_bars


def bars_of(spans: list[tuple[int, int]]) -> Bars:
    """Of each symbol the bars of the days from the first to before the second number."""
    time = np.concatenate([86_400 * np.arange(first, after) for first, after in spans])
    ones = np.ones(len(time))
    return Bars(
        source="test.csv",
        symbols=tuple(f"S{number}" for number in range(len(spans))),
        symbol=np.repeat(np.arange(len(spans)), [after - first for first, after in spans]),
        time=time, open=ones, high=ones, low=ones, close=ones, volume=ones,
    )  # fmt: skip


spans = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 200)).map(lambda pair: (pair[0], sum(pair))),
    min_size=1,
    max_size=4,
)


@examples(150)
@given(
    spans=spans,
    val_share=st.floats(0.05, 0.4),
    test_share=st.floats(0.05, 0.4),
    window=st.integers(1, 10),
    episode_bars=st.integers(1, 20),
)
def test_windows_and_episodes_lie_in_one_split_and_one_symbol(
    spans: list[tuple[int, int]],
    val_share: float,
    test_share: float,
    window: int,
    episode_bars: int,
) -> None:
    bars = bars_of(spans)
    try:
        splits = split_bars(
            bars,
            val_share=val_share,
            test_share=test_share,
            window=window,
            episode_bars=episode_bars,
        )
    except UsageError:
        assume(False)
    # Consecutive and apart, from the first time to the last.
    (first, _), *_, (_, after) = edges = [splits.bounds[split] for split in SPLITS]
    assert first == bars.time.min() and after == bars.time.max() + 1
    assert all(left[1] == right[0] for left, right in pairwise(edges))
    seen: dict[str, set[int]] = {}
    for split in SPLITS:
        begin, end = splits.bounds[split]
        expected = []
        for bar in range(len(bars.time)):  # slowly, from the definition
            touched = range(bar - window, bar + episode_bars + 1)
            if (
                touched[0] >= 0
                and touched[-1] < len(bars.time)
                and len({int(bars.symbol[i]) for i in touched}) == 1
                and all(begin <= bars.time[i] < end for i in touched)
            ):
                expected.append(bar)
        assert splits.starts[split].tolist() == expected
        assert splits.starts[split].dtype == np.int64
        seen[split] = {int(bars.time[start]) for start in expected}
    assert max(seen["train"]) < min(seen["val"]) <= max(seen["val"]) < min(seen["test"])


def test_shares_are_of_the_time() -> None:
    splits = split_bars(
        bars_of([(0, 1000), (900, 1000)]), val_share=0.15, test_share=0.15, window=5, episode_bars=5
    )
    days = {split: tuple(bound // 86_400 for bound in splits.bounds[split]) for split in SPLITS}
    assert days["train"] == (0, 700) and days["val"] == (700, 850)
    assert splits.num_unused == {"train": 1, "val": 1, "test": 0}
    assert len(splits.starts["train"]) == 700 - 5 - 5


def test_exactly_enough_is_enough_and_one_less_is_not() -> None:
    def split(number: int) -> None:
        split_bars(
            bars_of([(0, number)]), val_share=0.25, test_share=0.25, window=4, episode_bars=5
        )

    split(40)
    with pytest.raises(UsageError) as caught:
        split(36)
    assert "each split must have 10 bars of one symbol (window 4 + episode 5 + 1)" in str(
        caught.value
    )
    assert "train 18, val 9, test 9 (too short: val, test)" in str(caught.value)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_the_shortest_files_are_refused_not_mishandled(number: int) -> None:
    with pytest.raises(UsageError, match="too short"):
        split_bars(
            bars_of([(0, number)]), val_share=0.15, test_share=0.15, window=30, episode_bars=200
        )


def test_shares_that_leave_nothing_are_refused() -> None:
    with pytest.raises(UsageError, match=r"--val-share 0\.5 and --test-share 0\.5 leave nothing"):
        ClstmPpoConfig(val_share=0.5, test_share=0.5)
    with pytest.raises(UsageError, match="--test-share must be greater than 0, not 0"):
        ClstmPpoConfig(test_share=0)
