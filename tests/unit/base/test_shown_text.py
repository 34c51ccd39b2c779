"""Nothing that a terminal obeys is left of a user's text, and what is harmless stays as it is."""

from __future__ import annotations

import doctest
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.hostile_texts import COLOUR, HOSTILE, ORDERS, orders_in

from muster.base import shown_text
from muster.base.shown_text import clean_text, command_line, json_text, one_line

#: Letters that make sequences are frequent, so that random texts hold whole and broken ones.
_TEXTS = st.text(
    st.one_of(st.sampled_from("\x1b[]0;m\x07\\\x9b\x9d\x9c\n\r P"), st.characters(codec=None))
)


@given(_TEXTS)
def test_of_any_text_nothing_is_left_to_obey(text: str) -> None:
    assert not ORDERS.search(clean_text(text))
    assert not orders_in(clean_text(text, colours=True))
    assert not ORDERS.search(one_line(text))
    assert "\n" not in one_line(text)
    assert json.loads(json_text(json.dumps(text, ensure_ascii=False))) == text


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_hostile_texts_are_shown_and_cut(text: str) -> None:
    shown = one_line(text, 80)
    assert not ORDERS.search(shown)
    assert len(shown) <= 80
    assert clean_text(clean_text(text)) == clean_text(text)


def test_what_is_harmless_stays() -> None:
    for name in ("markup of a path", "formula", "html", "braces", "emoji", "wide", "long"):
        assert clean_text(HOSTILE[name]) == HOSTILE[name]


def test_colours_of_a_log_stay_and_end_with_it() -> None:
    shown = clean_text("\x1b[31mred\x1b[2J", colours=True)
    assert shown == "\x1b[31mred\x1b[0m"
    assert not COLOUR.search(clean_text(shown))


def test_doctests_run() -> None:
    failed, count = doctest.testmod(shown_text)
    assert count >= 2 and failed == 0


def test_a_secret_behind_an_odd_flag_or_with_a_dash_is_hidden() -> None:
    words = ["--2fa-token", "abc", "---_token", "abc", "--token", "-5abc", "--token", "--next"]
    assert command_line(words) == "--2fa-token … ---_token … --token … --token --next"
