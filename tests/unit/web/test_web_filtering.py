"""Words that say which tasks are wanted."""

from __future__ import annotations

from typing import Any

import pytest

from muster.web.query import BadQuery, Query, Word, parse, predicate


@pytest.mark.parametrize(
    ("text", "tests"),
    [
        ("", []),
        ("  lr=1  ", [Word("lr", "=", "1")]),
        ("lr>=1 lr<2 a!=b c~d", [Word("lr", ">=", "1"), Word("lr", "<", "2"),
                                 Word("a", "!=", "b"), Word("c", "~", "d")]),
        ('name="a b" "out of memory"', [Word("name", "=", "a b"), Word("", "~", "out of memory")]),
        (r'"a \"b\" = c"', [Word("", "~", 'a "b" = c')]),
        ("word", [Word("", "~", "word")]),
        ('"unclosed', [Word("", "~", "unclosed")]),
        ("=x", [Word("", "~", "=x")]),
        ("config.lr=1e-3", [Word("config.lr", "=", "1e-3")]),
    ],
)  # fmt: skip
def test_a_filter_is_words(text: str, tests: list[Word]) -> None:
    assert parse(text) == tests


@pytest.mark.parametrize(
    ("word", "cell", "passes"),
    [
        ("x=1", 1, True), ("x=1.0", 1, True), ("x=1", 1.5, False), ("x=1", None, False),
        ("x!=1", None, True), ("x>2", 3, True), ("x>2", "3", True), ("x>a", 3, False),
        ("x=true", True, True), ("x=True", True, True), ("x=1", True, False),
        ("x=abc", "abc", True), ("x=abc", "ABC", False), ("x~b", "ABC", True),
        ("x<nan", 1.0, False), ("x=nan", float("nan"), False), ("x>1e400", 5, False),
    ],
)  # fmt: skip
def test_numbers_are_compared_as_numbers(word: str, cell: Any, passes: bool) -> None:
    assert predicate(parse(word)[0])(cell) is passes


def test_what_cannot_be_understood_is_said() -> None:
    with pytest.raises(BadQuery, match="longer"):
        parse("x" * 2000)
    with pytest.raises(BadQuery, match="is not a number"):
        Query([("offset", "x")]).number("offset", 0, 0, 10)
    assert Query([("offset", "99")]).number("offset", 0, 0, 10) == 10
    with pytest.raises(BadQuery, match="is not a number"):
        Query([("from", "nan")]).maybe("from")
