"""An answer ends at its first end token or stop text, wherever the tokens are cut."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from muster.pipeline.engines.answers import Answer, window
from muster.pipeline.engines.engine import Sampling


def by_byte(tokens: Sequence[int]) -> str:
    return bytes(tokens).decode("utf-8", "replace")


def without_leading_space(tokens: Sequence[int]) -> str:
    """As many tokenizers: a text has no space before its first word."""
    return by_byte(tokens).removeprefix(" ")


def answer(stops: tuple[str, ...], decode: object = by_byte, limit: int = 10**6) -> Answer:
    return Answer(
        prompt=[1],
        sampling=Sampling(stop=stops),
        seed=0,
        limit=limit,
        end_tokens=frozenset({0}),
        decode=decode,  # type: ignore[arg-type]
    )


TEXT = st.text(alphabet="ab é€😀 ", max_size=30)
STOPS = st.lists(st.text(alphabet="ab é€", min_size=1, max_size=4), max_size=3).map(tuple)


def first_end(text: str, stops: tuple[str, ...]) -> tuple[str, int] | None:
    """By definition: the shortest beginning of the text that holds a stop text, cut before it."""
    for length in range(len(text) + 1):
        places = [text[:length].find(stop) for stop in stops if stop in text[:length]]
        if places:
            return text[: min(places)], len(text[:length].encode())
    return None


@given(TEXT, STOPS)
def test_a_stop_text_is_found_byte_by_byte(text: str, stops: tuple[str, ...]) -> None:
    one = answer(stops)
    expected = first_end(text, stops)
    for token in text.encode():
        if one.take(token):
            break
    if expected is None:
        assert one.finish_reason is None
    else:
        assert (one.text, len(one.tokens), one.finish_reason) == (*expected, "stop")


def test_a_space_before_a_word_is_not_lost() -> None:
    one = answer((" b",), without_leading_space)
    ends = [one.take(token) for token in b"a a b"]
    assert ends == [False] * 4 + [True]
    assert one.text == "a a"


def test_an_end_token_ends_and_is_counted() -> None:
    one = answer(())
    assert [one.take(token) for token in (97, 98, 0)] == [False, False, True]
    assert (one.finish_reason, len(one.tokens)) == ("stop", 3)


def test_the_limit_ends_with_its_own_reason() -> None:
    one = answer(("x",), limit=2)
    assert [one.take(97), one.take(98)] == [False, True]
    assert (one.finish_reason, one.text) == ("length", "ab")


def test_after_a_restart_it_is_as_new() -> None:
    one = answer(("ab",))
    one.take(97)
    one.restart()
    assert not one.take(98) and one.tokens == [98]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=20), st.integers(1, 25))
def test_the_oldest_goes_and_its_mates_are_as_long(lengths: list[int], count: int) -> None:
    places = window(lengths, count)
    assert len(places) == len(set(places)) == min(count, len(lengths))
    assert 0 in places
    chosen = sorted(lengths[place] for place in places)
    # No other choice of as many that holds the oldest has a smaller spread.
    rest = sorted(lengths)
    spreads = [
        rest[begin + len(chosen) - 1] - rest[begin]
        for begin in range(len(rest) - len(chosen) + 1)
        if rest[begin] <= lengths[0] <= rest[begin + len(chosen) - 1]
    ]
    assert chosen[-1] - chosen[0] == min(spreads)
