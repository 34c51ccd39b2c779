"""Small sums through sockets between the ranks of one host."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
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
    begun = []
    for rank, part in zip(ranks, parts, strict=True):
        assert rank is not None
        begun.append((rank, rank.begin(part)))
    return [rank.end(number) for rank, number in begun]


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
                first.end(first.begin([1.0]))
            error = RankError(type="RuntimeError", message=str(caught.value), frames=(), time_s=0.0)
            said.append(consequence(RankEnd(rank=0, code=1, time_s=0.0, error=error)))
    assert said[0] == "timed out waiting for the others"
    # A socket says "reset" once where its peer has left something unread.
    assert {*said[1:]} == {"broken pipe", "connection reset by peer"}


def test_signals_that_come_again_and_again_do_not_make_the_wait_longer() -> None:
    """As a profiler's timer does; the kernel's own limit began anew with each."""
    heard = 0

    def hear(*_: object) -> None:
        nonlocal heard
        heard += 1
        assert heard < 100, "it should have given up"

    before = signal.signal(signal.SIGALRM, hear)
    try:
        with connected(2, timeout_s=0.5) as (first, second):
            assert first is not None and second is not None
            signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
            with pytest.raises(RuntimeError, match="timed out waiting"):
                first.end(first.begin([1.0]))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert heard > 1


def test_what_a_peer_has_sent_before_it_went_is_read() -> None:
    with connected(2) as (first, second):
        assert first is not None and second is not None
        begun = first.begin([1.0])
        assert second.end(second.begin([1.0])) == [2.0]
        second.close()
        assert first.end(begun) == [2.0]
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


def test_what_ranks_left_that_were_killed_meanwhile_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    old_s = time.time() - 500.0
    for name, bound, is_old in (
        ("muster-left", True, True), ("muster-new", True, False), ("muster-file", False, True),
        ("other-left", True, True),
    ):  # fmt: skip
        place = tmp_path / name / "rank"
        place.parent.mkdir()
        if bound:
            with socket.socket(socket.AF_UNIX) as left:
                left.bind(str(place))
        else:
            place.touch()
        if is_old:
            os.utime(place, (old_s, old_s))
    (tmp_path / "muster-link").symlink_to(tmp_path / "other-left")
    with connected(2, timeout_s=60.0):
        kept = {"muster-new", "muster-file", "muster-link", "other-left"}
        assert {path.name for path in tmp_path.iterdir()} == kept
        assert (tmp_path / "other-left" / "rank").exists()


def test_a_rank_without_a_folder_for_them_has_none_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/no/such/folder")
    with connected(2) as ranks:
        assert ranks == [None, None]


def test_a_limit_that_the_program_has_set_for_its_sockets_is_not_theirs() -> None:
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(0.05)
    try:
        with connected(2) as (first, second), ThreadPoolExecutor(1) as other:
            assert first is not None and second is not None
            waiting = other.submit(lambda: first.end(first.begin([1.0])))
            time.sleep(0.2)
            assert second.end(second.begin([2.0])) == waiting.result() == [3.0]
    finally:
        socket.setdefaulttimeout(before)


def test_a_part_of_another_sum_is_never_added() -> None:
    with connected(2) as (first, second):
        assert first is not None and second is not None
        begun = first.begin([1.0]), second.begin([2.0, 3.0])
        for rank, number in zip((first, second), begun, strict=True):
            with pytest.raises(RuntimeError, match="is at another sum"):
                rank.end(number)
    with connected(2) as (first, second):
        assert first is not None and second is not None
        early = first.begin([1.0])
        second.begin([1.0])
        second.begin([5.0])
        late = first.begin([5.0])
        with pytest.raises(RuntimeError, match="was not waited for"):
            first.end(early)
        assert first.end(late) == [10.0]


def test_what_is_sent_to_a_dead_rank_does_not_end_a_program_that_asks_for_the_signal() -> None:
    script = (
        "import signal\nfrom tests.unit.gang.test_peer_sockets import connected\n"
        "signal.signal(signal.SIGPIPE, signal.SIG_DFL)\n"
        "with connected(2) as (first, second):\n"
        "    second.close()\n"
        "    try:\n        first.begin([1.0])\n"
        "    except RuntimeError:\n        print('told')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "told\n"), done.stderr
