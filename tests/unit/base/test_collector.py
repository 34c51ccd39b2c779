"""Python looks for cycles as often as before once a run is over."""

from __future__ import annotations

import gc

from muster.base.collector import collecting_rarely


def test_runs_that_overlap_leave_it_as_it_was() -> None:
    """As in two threads of a notebook: the first to begin is the first to end."""
    before = gc.get_threshold()
    first, second = collecting_rarely(), collecting_rarely()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert gc.get_threshold()[0] >= 50_000
    second.__exit__(None, None, None)
    assert gc.get_threshold() == before
