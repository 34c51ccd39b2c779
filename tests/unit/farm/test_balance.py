"""Counts balance before anything is published: from any change of them one hears of it."""

from __future__ import annotations

import itertools

from hypothesis import assume, given
from hypothesis import strategies as st

from muster.api.maps.publish import ChunkCounts, imbalance_of_rows
from muster.farm.plan import imbalance_of_tasks
from muster.farm.task import TaskState


@st.composite
def maps(draw: st.DrawFn) -> tuple[list[int], list[ChunkCounts]]:
    """Shards, cut into chunks in any way, whose rows went anywhere."""
    shards = draw(st.lists(st.integers(1, 60), max_size=4))
    chunks = []
    for order, count in enumerate(shards):
        inner = draw(st.sets(st.integers(1, count - 1), max_size=4)) if count > 1 else set()
        ends = [0, *sorted(inner), count]
        for start, stop in itertools.pairwise(ends):
            dropped = draw(st.integers(0, stop - start))
            rejected = draw(st.integers(0, stop - start - dropped))
            out = stop - start - dropped - rejected + draw(st.integers(0, 3))
            chunks.append(ChunkCounts(order, start, stop, stop - start, out, dropped, rejected))
    return shards, draw(st.permutations(chunks))


@given(maps())
def test_a_map_that_lost_nothing_balances(case: tuple[list[int], list[ChunkCounts]]) -> None:
    assert imbalance_of_rows(*case) is None


@given(maps(), st.data())
def test_a_chunk_that_is_gone_doubled_or_shorter_shows(
    case: tuple[list[int], list[ChunkCounts]], data: st.DataObject
) -> None:
    shards, chunks = case
    assume(chunks)
    number = data.draw(st.integers(0, len(chunks) - 1))
    chunk = chunks[number]
    damaged = {
        "gone": chunks[:number] + chunks[number + 1 :],
        "doubled": [*chunks, chunk],
        "shorter": [*chunks[:number], chunk._replace(stop=chunk.stop - 1), *chunks[number + 1 :]],
        "fewer rows": [
            *chunks[:number], chunk._replace(rows_in=chunk.rows_in - 1), *chunks[number + 1 :]
        ],
        "lost records": [
            *chunks[:number],
            chunk._replace(rows_out=chunk.rows_in - chunk.dropped - chunk.rejected - 1),
            *chunks[number + 1 :],
        ],
    }  # fmt: skip
    for what, others in damaged.items():
        assert imbalance_of_rows(shards, others) is not None, what
    assert imbalance_of_rows([*shards, 5], chunks) is not None


def test_the_message_has_the_numbers() -> None:
    kept = ChunkCounts(0, 0, 1085, 1085, 1080, 3, 2)
    assert imbalance_of_rows([3000], [kept]) == (
        "the source has 3,000 rows, and the finished chunks account for 1,085 (1,080 records out, "
        "3 rows dropped, 2 rejected): shard 0 ends at row 1,085 of 3,000"
    )


COUNTS = st.fixed_dictionaries({state: st.integers(0, 1000) for state in TaskState})


@given(COUNTS)
def test_a_sweep_that_lost_nothing_balances(counts: dict[TaskState, int]) -> None:
    known = sum(counts.values())
    done = counts[TaskState.DONE] + counts[TaskState.STOPPED]
    assert imbalance_of_tasks(known, counts, done) is None
    assert imbalance_of_tasks(known // 2, counts, done) is None  # seeds of an earlier command


@given(COUNTS, st.integers(1, 50))
def test_a_task_or_a_result_that_is_gone_shows(counts: dict[TaskState, int], lost: int) -> None:
    known = sum(counts.values())
    done = counts[TaskState.DONE] + counts[TaskState.STOPPED]
    found = imbalance_of_tasks(known + lost, counts, done)
    assert found is not None
    assert f"{known + lost:,} tasks" in found
    assert f"{counts[TaskState.DONE]:,} done" in found
    assert imbalance_of_tasks(known, counts, done + lost) is not None
    assert imbalance_of_tasks(known, counts, done - lost) is not None
