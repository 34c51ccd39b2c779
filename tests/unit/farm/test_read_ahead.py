"""A table's rows are read by a thread, which closes what it has opened, however that ends."""

from __future__ import annotations

import threading
from collections.abc import Generator

import pytest

from muster.farm.table import ahead

Seen = list[tuple[str, threading.Thread]]


def numbers(seen: Seen, count: int) -> Generator[int, None, None]:
    """0, 1 and so on; then an error."""
    seen.append(("begin", threading.current_thread()))
    try:
        yield from range(count)
        raise ValueError("there are no more")
    finally:
        seen.append(("end", threading.current_thread()))


@pytest.mark.parametrize("how", ["error", "left early", "never begun"])
def test_what_it_opens_is_closed_by_the_same_thread(how: str) -> None:
    seen: Seen = []
    got: list[int] = []
    if how == "error":
        with pytest.raises(ValueError, match="no more"), ahead(numbers(seen, 3)) as stream:
            got.extend(stream)
        assert got == [0, 1, 2]
    else:
        with pytest.raises(KeyError), ahead(numbers(seen, 3)) as stream:
            if how == "left early":
                got.append(next(stream))
            raise KeyError
        assert got == [0] * (how == "left early")
    assert [what for what, _ in seen] == ["begin", "end"] * (how != "never begun")
    threads = {thread for _, thread in seen}
    assert threading.current_thread() not in threads
    assert len(threads) == (how != "never begun")
    assert not any(thread.is_alive() for thread in threads)


def test_the_next_one_is_made_while_one_is_used() -> None:
    made = threading.Semaphore(0)

    def two() -> Generator[int, None, None]:
        for number in range(2):
            made.release()
            yield number

    with ahead(two()) as stream:
        assert next(stream) == 0
        assert made.acquire(timeout=10)
        assert made.acquire(timeout=10), "the second is made only when it is asked for"
        assert list(stream) == [1]
