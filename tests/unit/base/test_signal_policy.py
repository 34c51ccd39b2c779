"""Who takes a signal, and what a request to end leads to."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator

import pytest

from muster.base.signals import Interrupted, Requests, handled, listening, stop_code

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")

INT, TERM, HUP, USR1 = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (INT, TERM, HUP, USR1)}
    signal.signal(INT, signal.default_int_handler)  # a background job's is ignored
    signal.signal(HUP, signal.SIG_DFL)  # nohup ignores it
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(("number", "code"), [(INT, 130), (TERM, 75), (HUP, 75), (USR1, 75)])
def test_only_ctrl_c_means_that_it_shall_not_start_again(number: int, code: int) -> None:
    assert stop_code(number) == code


@pytest.mark.parametrize("number", [INT, TERM, HUP, USR1])
def test_an_ignored_signal_stays_ignored(number: int) -> None:
    signal.signal(number, signal.SIG_IGN)
    with listening() as requests:
        signal.raise_signal(number)
        signal.raise_signal(number)
        assert requests.heard == []
    assert signal.getsignal(number) is signal.SIG_IGN


def test_what_our_own_launcher_sends_is_heard_in_any_case() -> None:
    signal.signal(TERM, signal.SIG_IGN)
    heard: list[int] = []
    with handled(["SIGHUP"], lambda number, _: heard.append(number), always=["SIGTERM"]):
        signal.raise_signal(TERM)
    assert heard == [TERM]
    assert signal.getsignal(TERM) is signal.SIG_IGN


@pytest.mark.parametrize("number", [INT, TERM, HUP])
def test_the_first_waits_and_the_second_ends_at_once(number: int) -> None:
    with pytest.raises(Interrupted) as caught, listening() as requests:
        signal.raise_signal(number)
        assert requests.heard == [number]
        signal.raise_signal(number)
    assert caught.value.number == number


def test_a_request_of_our_own_is_never_the_second() -> None:
    with listening() as requests:
        assert not requests.ask(TERM), "nobody takes it"
        with requests.watched():
            assert requests.ask(TERM) and not requests.ask(TERM)
            requests.withdraw()
            assert (requests.heard, requests.reason) == ([], 0), "nobody has taken it"
            assert requests.ask(TERM) and requests.take() == [TERM]
            signal.raise_signal(INT)
            requests.withdraw()
            assert requests.take() == [INT], "what came after it is the user's"
            assert not requests.ask(TERM)


def test_a_warning_never_ends_what_may_wait() -> None:
    with listening() as requests:
        for _ in range(3):
            signal.raise_signal(USR1)
        signal.raise_signal(TERM)
        assert requests.take() == [USR1, USR1, USR1, TERM]
        assert requests.take() == []


def test_where_nothing_can_be_saved_the_first_ends_it() -> None:
    with pytest.raises(Interrupted), listening(may_wait=False):
        signal.raise_signal(TERM)


def test_inside_it_is_the_same_list_and_the_outer_rule_comes_back() -> None:
    with listening(may_wait=False) as outer:
        with listening() as inner:
            assert inner is outer
            signal.raise_signal(TERM)
        with pytest.raises(Interrupted):
            signal.raise_signal(HUP)


def test_who_watches_gets_them_all() -> None:
    with listening() as requests, requests.watched():
        for number in (TERM, TERM, INT):
            signal.raise_signal(number)
        assert requests.take() == [TERM, TERM, INT]
    assert requests.reason == INT


def test_what_nobody_acted_upon_goes_to_the_caller() -> None:
    heard: list[int] = []
    signal.signal(TERM, lambda number, _: heard.append(number))
    with listening():
        signal.raise_signal(TERM)
        assert heard == []
    assert heard == [TERM]
    with listening() as requests:
        signal.raise_signal(TERM)
        requests.take()
    assert heard == [TERM]


def test_a_handler_of_the_caller_for_the_warning_is_left_alone() -> None:
    heard: list[int] = []
    signal.signal(USR1, lambda number, _: heard.append(number))
    with listening():
        signal.raise_signal(USR1)
    assert heard == [USR1]


def test_other_threads_get_none() -> None:
    found: list[Requests] = []

    def look() -> None:
        with listening() as requests:
            found.append(requests)

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found[0].heard == []
