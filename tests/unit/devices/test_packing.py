from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.devices.packing import workers_that_fit


@pytest.mark.parametrize(
    ("peaks", "total", "others", "current", "cap", "workers"),
    [
        ([], 80_000, 0, 1, 16, 1),
        ([], 80_000, 0, 4, 16, 4),
        ([0, 0], 80_000, 0, 1, 16, 1),
        ([9_000], None, 0, 3, 16, 3),
        ([9_000], 80_000, 0, 1, 16, 2),
        ([9_000], 80_000, 0, 4, 16, 8),
        ([9_000], 80_000, 0, 8, 16, 8),
        ([1_000, 9_000, 500], 80_000, 0, 8, 16, 8),
        ([9_000], 80_000, 36_000, 8, 16, 4),
        ([9_000], 80_000, 79_000, 8, 16, 1),
        ([90_000], 80_000, 0, 2, 16, 1),
        ([100], 80_000, 0, 8, 12, 12),
        ([100], 80_000, 0, 99, 12, 12),
        ([100], 80_000, 0, 0, 12, 2),
    ],
)
def test_workers_that_fit(
    peaks: list[int], total: int | None, others: int, current: int, cap: int, workers: int
) -> None:
    assert workers == workers_that_fit(
        peaks_mib=peaks, total_mib=total, others_mib=others, current=current, cap=cap
    )


def test_growth_ends_at_what_fits() -> None:
    workers, history = 1, []
    for _ in range(6):
        workers = workers_that_fit(
            peaks_mib=[5_000], total_mib=80_000, others_mib=2_000, current=workers, cap=32
        )
        history.append(workers)
    assert history == [2, 4, 8, 14, 14, 14]


@given(
    peaks=st.lists(st.integers(0, 100_000), max_size=5),
    total=st.none() | st.integers(0, 200_000),
    others=st.integers(0, 200_000),
    current=st.integers(0, 40),
    cap=st.integers(1, 20),
)
def test_between_one_and_the_cap_and_within_the_memory(
    peaks: list[int], total: int | None, others: int, current: int, cap: int
) -> None:
    workers = workers_that_fit(
        peaks_mib=peaks, total_mib=total, others_mib=others, current=current, cap=cap
    )
    assert 1 <= workers <= cap
    if total is not None and any(peaks) and workers > 1:
        assert workers * max(peaks) + others <= total * 0.9


def test_a_cap_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="must be"):
        workers_that_fit(peaks_mib=[], total_mib=1, others_mib=0, current=1, cap=0)
