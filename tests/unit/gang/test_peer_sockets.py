"""Small sums through sockets between the ranks of one host."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from muster.gang.blame import RankEnd, RankError, consequence
from muster.rank.peer_sockets import PeerSockets, connect_peers

#: Numbers whose sum depends on the order in which they are added.
PARTS = ([1e16, 0.1], [1.0, 0.2], [-1e16, 0.3])


@contextmanager
def connected(
    num_ranks: int, timeout_s: float = 60.0, *, seen: Callable[[Any], Any] = lambda path: path
) -> Iterator[list[PeerSockets | None]]:
    """The sockets of ranks that are threads; ``seen``: a path, as the last rank sees it."""
    values, barrier = [None] * num_ranks, threading.Barrier(num_ranks)

    def rank(number: int) -> PeerSockets | None:
        def gather(value: Any) -> list[Any]:
            values[number] = value
            barrier.wait()
            found = list(values)
            barrier.wait()
            return [seen(each) if number == num_ranks - 1 else each for each in found]

        return connect_peers(number, num_ranks, gather, timeout_s)

    with ExitStack() as stack, ThreadPoolExecutor(num_ranks) as threads:
        ranks = list(threads.map(rank, range(num_ranks)))
        for each in filter(None, ranks):
            stack.callback(each.close)
        yield ranks


def added(ranks: Sequence[PeerSockets | None], parts: Sequence[Sequence[float]]) -> list[Any]:
    for rank, part in zip(ranks, parts, strict=True):
        assert rank is not None
        rank.begin(part)
    return [rank and rank.end() for rank in ranks]


def test_a_sum_has_the_same_bits_on_all_ranks() -> None:
    with connected(3) as ranks:
        assert added(ranks, PARTS) == [[sum(column) for column in zip(*PARTS, strict=True)]] * 3
        for rank in ranks:
            assert rank is not None
            rank.begin([7.0])  # which nobody reads
        assert added(ranks, [[1.0, 2.0]] * 3) == [[3.0, 6.0]] * 3


def test_a_rank_whose_peer_has_gone_is_not_taken_for_the_culprit() -> None:
    said = []
    with connected(2, timeout_s=1) as (first, second):
        assert first is not None and second is not None
        for how in ("is silent", "goes", "has gone"):
            if how == "goes":
                second.close()
            with pytest.raises(RuntimeError) as caught:
                first.begin([1.0])
                first.end()
            error = RankError(type="RuntimeError", message=str(caught.value), frames=(), time_s=0.0)
            said.append(consequence(RankEnd(rank=0, code=1, time_s=0.0, error=error)))
    assert said[0] == "timed out waiting for the others"
    # A socket says "reset" once where its peer has left something unread.
    assert {*said[1:]} == {"broken pipe", "connection reset by peer"}


def test_what_a_peer_has_sent_before_it_went_is_read() -> None:
    with connected(2) as (first, second):
        assert first is not None and second is not None
        first.begin([1.0])
        second.begin([1.0])
        assert second.end() == [2.0]
        second.close()
        assert first.end() == [2.0]
        with pytest.raises(RuntimeError, match="Broken pipe"):
            first.begin([1.0])


@pytest.mark.parametrize("path", [None, "/no/such/folder/rank"])
def test_no_rank_goes_on_with_sockets_where_one_does_not_reach_another(path: str | None) -> None:
    def seen(value: Any) -> Any:
        return path if isinstance(value, str) else value

    with connected(3, seen=seen) as ranks:
        assert ranks == [None] * 3


def test_no_file_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with connected(2) as ranks:
        assert None not in ranks
        assert list(tmp_path.iterdir()) == []
