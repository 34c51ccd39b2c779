"""Places in commands: each value is one argument, whatever it holds."""

from __future__ import annotations

import shlex
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.base.errors import UnknownNameError, UsageError
from muster.farm.template import (
    check_places,
    fill,
    is_number,
    names_in,
    shell_line,
    to_number,
)

VALUES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=30)


@given(VALUES, VALUES)
def test_a_value_is_put_in_as_it_is_and_never_looked_into(one: str, two: str) -> None:
    values = {"a": one + "{b}", "b": two}
    assert fill("x={a},y={b}", values) == f"x={one}{{b}},y={two}"


@pytest.mark.parametrize(
    ("part", "names", "text"),
    [
        ("plain", set(), "plain"),
        ("--lr={lr}", {"lr"}, "--lr=1e-3"),
        ("{lr}{lr}", {"lr"}, "1e-31e-3"),
        ('{"a": 1}', set(), '{"a": 1}'),
        ('{"a": {lr}}', {"lr"}, '{"a": 1e-3}'),
        ("${HOME} {1} {}", set(), "${HOME} {1} {}"),
        ("model.width={model.width}", {"model.width"}, "model.width=64"),
        ("{a-b}/{a/b}", {"a-b", "a/b"}, "{a-b}/{a/b}"),
        ("out=${model.width}", set(), "out=${model.width}"),
        ("{on}", {"on"}, "true"),
    ],
)
def test_places_and_what_only_looks_like_one(part: str, names: set[str], text: str) -> None:
    assert names_in(part) == names
    assert fill(part, {"lr": "1e-3", "on": True, "model.width": 64}) == text


@given(st.lists(VALUES.filter(lambda v: "{" not in v), min_size=2, max_size=5))
def test_fixed_words_keep_their_borders_in_a_shell_line(words: list[str]) -> None:
    assert shlex.split(shell_line(words)) == words


def test_a_shell_line_runs_what_was_typed() -> None:
    line = shell_line(["printf", "%s|", "two words", "{x}", "it's"])
    filled = fill(line, {"x": "7"})
    done = subprocess.run(["/bin/sh", "-c", filled], capture_output=True, text=True, check=True)
    assert done.stdout == "two words|7|it's|"
    assert shell_line(["a | b > {x}"]) == "a | b > {x}", "one word is a line already"


def test_places_and_parameters_must_match() -> None:
    check_places(["run", "--lr={lr}", "{dir}"], ["lr"])
    check_places(["run", "model.width={model.width}"], ["model.width"])
    check_places(["sh -c 'run --seed $MUSTER_SEED'"], ["seed"])
    check_places(["sh -c 'run ${MUSTER_PARAMS}'"], ["lr", "seed"])
    with pytest.raises(UnknownNameError, match=r"did you mean 'model\.width'"):
        check_places(["run", "{model.widht}"], ["model.width"])
    with pytest.raises(UnknownNameError, match="did you mean 'lr'"):
        check_places(["run", "{lrr}"], ["lr"])
    with pytest.raises(UsageError, match="'seed' does not appear"):
        check_places(["run", "{lr}"], ["lr", "seed"])
    with pytest.raises(UsageError, match="no command"):
        check_places([], [])


@pytest.mark.parametrize("text", ["3", "-1", "1e-3", "0.10", "1.", "-.5", "2E+4", "0"])
def test_texts_that_are_numbers(text: str) -> None:
    assert is_number(text)
    assert to_number(text) == float(text)


@pytest.mark.parametrize("text", ["007", "1_000", "nan", "inf", "1,5", "+1", "0x1f", "", "1e", "٣"])
def test_texts_that_stay_texts(text: str) -> None:
    assert not is_number(text)
