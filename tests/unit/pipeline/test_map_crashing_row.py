"""Which row killed the worker: a simulation of attempts that die, against the plain truth."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from muster.pipeline.recovery import InProgress, Kind, recovery


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
    doubted: list[int] = []
    while row < rows:
        if row in done or row in doubted:
            row += 1
            continue
        if mind.has_verdict(row):
            doubted.append(row)
            continue
        end = row + 1 if mind.is_suspect(row) else min(rows, row + batch)
        taken = [r for r in range(row, end) if r not in done]
        note = mind.note(row, end, tries, doubted[0] if doubted else -1)
        if poison & set(taken):
            return note, False
        done.update(dict.fromkeys(doubted, False))
        doubted = []
        done.update(dict.fromkeys(taken, True))
    done.update(dict.fromkeys(doubted, False))
    return note, True


@given(st.sets(st.integers(0, 39), max_size=6) | st.just(set(range(6))), st.integers(1, 16))
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


def test_no_row_is_rejected_before_a_worker_has_lived() -> None:
    """It may be the device that ends them all."""
    done: dict[int, bool] = {}
    note = None
    for tries in range(50):
        note, is_over = attempt(set(range(40)), done, note, tries, 40, 8)
        assert not is_over and not done
    for tries in (50, 51, 52):
        note, is_over = attempt(set(), done, note, tries, 40, 8)
    assert is_over and len(done) == 40
    assert note is not None and note.doubted == -1


def test_what_a_broken_context_rejects_is_said_to_be_that() -> None:
    single = recovery(InProgress(3, 8, 2, Kind.BATCH, 0), 3, retries=0).note(3, 4, 3)
    for note, said in (
        (single, "the worker process died or hung 1 time while"),
        (single.broken(), "the GPU context of the worker process broke 1 time while"),
    ):
        mind = recovery(note, 4, retries=0)
        assert mind.has_verdict(3) and not mind.has_verdict(4)
        assert said in mind.verdict.reason


def test_a_set_up_that_dies_is_counted() -> None:
    mind = recovery(None, 0, retries=1)
    for expected in (1, 2, 3):
        mind = recovery(mind.starting(expected - 1), expected, retries=1)
        assert mind.num_starts == expected
