"""Which row killed the worker: a simulation of attempts that die, against the plain truth."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from muster.pipeline.batch import InProgress, Kind, recovery


def attempt(
    poison: set[int],
    done: dict[int, bool],
    note: InProgress | None,
    tries: int,
    rows: int,
    batch: int,
) -> tuple[InProgress | None, bool]:
    """One worker's life: (its last note, whether it came to the end)."""
    mind = recovery(note, tries, retries=1)
    row = 0
    while row < rows:
        if row in done:
            row += 1
            continue
        if row == mind.rejected:
            done[row] = False
            continue
        end = row + 1 if mind.is_suspect(row) else min(rows, row + batch)
        taken = [r for r in range(row, end) if r not in done]
        note = mind.note(row, end, tries)
        if poison & set(taken):
            return note, False
        done.update(dict.fromkeys(taken, True))
    return note, True


@given(st.sets(st.integers(0, 39), max_size=6), st.integers(1, 16))
def test_just_the_rows_that_kill_are_rejected(poison: set[int], batch: int) -> None:
    done: dict[int, bool] = {}
    note, tries = None, 0
    for _ in range(4 * len(poison) + 1):
        note, is_over = attempt(poison, done, note, tries, 40, batch)
        if is_over:
            break
        tries += 1
    assert is_over
    assert {row for row, is_good in done.items() if not is_good} == poison
    assert len(done) == 40


def test_an_end_that_was_nobodys_fault_blames_no_row() -> None:
    note = InProgress(3, 8, 2, Kind.SINGLE, 1)
    assert recovery(note, 2, retries=1).rejected == -1  # the coordinator was killed
    assert recovery(note, 3, retries=1).rejected == 3


def test_a_set_up_that_dies_is_counted() -> None:
    mind = recovery(None, 0, retries=1)
    for expected in (1, 2, 3):
        mind = recovery(mind.starting(expected - 1), expected, retries=1)
        assert mind.num_starts == expected
