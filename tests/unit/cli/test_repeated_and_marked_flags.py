"""A flag that is said twice, and what a user's class says to tyro about its fields."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import pytest
import tyro
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.base.errors import TargetError, UsageError
from muster.cli.commands.sweep import flags_of_sweep
from muster.cli.help_page import page
from muster.cli.options import options_of
from muster.cli.parse import Parsed, parse, parse_groups


@dataclass(frozen=True, kw_only=True)
class Many:
    """Of every kind that holds several values."""

    dims: tuple[int, ...] = (4,)
    names: list[str] = field(default_factory=list)
    tags: frozenset[str] | None = None
    pair: tuple[int, int] = (1, 2)
    weights: dict[str, float] = field(default_factory=dict)
    rate: float = 0.0


def test_a_flag_that_takes_any_number_of_values_adds_up() -> None:
    """Before, ``--student-dims 16 --student-dims 64`` was 64, without a word."""
    words = "--dims 16 --names a b --dims 32 64 --names c --tags x --tags y x".split()
    found = parse(Many, words, "try", "")
    assert found.dims == (16, 32, 64)
    assert found.names == ["a", "b", "c"]
    assert found.tags == {"x", "y"}
    assert parse(Many, "--weights a 1 --weights b 2".split(), "try", "").weights == {
        "a": 1.0, "b": 2.0,
    }  # fmt: skip


def test_of_a_flag_with_one_value_the_last_is_taken() -> None:
    found = parse(Many, "--rate 1 --pair 3 4 --rate 2 --pair 5 6".split(), "try", "")
    assert (found.rate, found.pair) == (2.0, (5, 6))


def test_what_was_said_twice_is_said_once_again() -> None:
    parsed = parse_groups({"many": Many}, "--dims 16 --rate 1 --dims 64".split(), "try", "")
    assert parsed.argv() == ["muster", "try", "--dims", "16", "64", "--rate", "1"]
    with pytest.raises(UsageError, match="--dims x: write a whole number"):
        parse(Many, "--dims 1 --dims x".split(), "try", "")


@dataclass(frozen=True, kw_only=True)
class Texts:
    """Of kinds that take any text."""

    name: str = ""
    names: tuple[str, ...] = ()
    pair: tuple[str, str] = ("", "")
    quick: bool = False


_TEXTS = st.text(st.sampled_from("-=é aA1."), max_size=4) | st.sampled_from(
    ["--", "-x", "-1", "--name", "--names=a", "--no-quick", "-h", "None"]
)


def typed(flag: str, text: str) -> list[str]:
    """A word with a blank is no flag, whatever it begins with."""
    return [flag, text] if " " in text else [f"{flag}={text}"]


@settings(deadline=None)
@given(
    name=_TEXTS,
    names=st.lists(_TEXTS, max_size=3),
    first=_TEXTS,
    program=st.lists(_TEXTS, max_size=2),
)
def test_what_a_reading_writes_is_read_as_the_same(
    name: str, names: list[str], first: str, program: list[str]
) -> None:
    """``--slurm-arg=--exclusive`` was submitted, and the node had no flag --exclusive."""
    words = [word for text in names for word in typed("--names", text)]
    words += [*typed("--name", name), *typed("--pair", first), "b", "--quick"]
    what = "PROGRAM" if program else ""

    def read(argv: list[str]) -> Parsed:
        return parse_groups({"texts": Texts}, argv, "try", "", program=what)

    before = read([*words, "--", *program] if program else words)
    after = read(before.argv()[2:])
    wanted = Texts(name=name, names=tuple(names), pair=(first, "b"), quick=True)
    assert before.texts == after.texts == wanted
    assert before.program == after.program == tuple(program)


def test_recipes_and_seeds_that_are_said_twice() -> None:
    """``--seeds 3 --seeds 5`` was 5 seeds of a function, and seeds 3 and 5 of a recipe."""
    of_function = flags_of_sweep("train.py:run --seeds 3 --seeds 5".split())
    assert of_function.space.seeds == "5"
    parsed = flags_of_sweep("ssm --student-dims 16 --student-dims 64 --seeds 3 --seeds 5".split())
    assert parsed.recipe.student_dims == (16, 64)
    assert list(parsed.recipe.seeds) == [0, 1, 2, 3, 4], "the last, as of a function's sweep"


@dataclass(frozen=True, kw_only=True)
class Marked:
    """Marked in tyro's words."""

    source: tyro.conf.Positional[Path] = Path("in")
    """What is read."""
    cache: tyro.conf.Suppress[int] = 7
    version: tyro.conf.Fixed[str] = "1"
    exact: tyro.conf.FlagConversionOff[bool] = True
    """Whether it is exact."""
    rate: Annotated[
        float, tyro.conf.arg(name="learning_rate", aliases=["-r"], help="How fast.", metavar="R")
    ] = 0.1
    nested: tyro.conf.OmitArgPrefixes[Many] = Many()


def test_the_usual_marks_of_tyro_are_honoured() -> None:
    """Before, all of them were passed over: ``Fixed`` could be changed, an alias was unknown."""
    words = "data.csv --exact false -r 0.5 --dims 1".split()
    found = parse(Marked, words, "try", "")
    assert found == Marked(source=Path("data.csv"), exact=False, rate=0.5, nested=Many(dims=(1,)))
    for line in ("--cache 1", "--version 2"):
        with pytest.raises(UsageError, match="has no flag"):
            parse(Marked, line.split(), "try", "")
    with pytest.raises(UsageError, match="--exact maybe: write true or false"):
        parse(Marked, ["--exact", "maybe"], "try", "")
    shown = "\n".join(page("try", "", options_of("marked", Marked), (), is_all=True))
    assert "[SOURCE]" in shown and "--exact true|false" in shown
    assert "--learning-rate R" in shown and "How fast." in shown
    assert "cache" not in shown and "version" not in shown


def test_other_marks_are_refused_by_name() -> None:
    @dataclass
    class Counted:
        verbose: tyro.conf.UseCounterAction[int] = 0

    @dataclass
    class Read:
        size: Annotated[int, tyro.conf.arg(constructor=len)] = 0

    @dataclass
    class Positions:
        sizes: tyro.conf.Positional[tuple[int, ...]] = ()

    for kind, mark in ((Counted, "UseCounterAction"), (Read, "constructor"),
                       (Positions, "Positional")):  # fmt: skip
        with pytest.raises(TargetError, match=f"{kind.__name__}.* cannot be a flag.*{mark}"):
            options_of("own", kind)


def test_a_value_that_may_be_none_is_refused_in_a_sentence() -> None:
    """It ended in a traceback."""

    @dataclass
    class Perhaps:
        sure: bool | None = None

    with pytest.raises(UsageError, match="--sure maybe: write true or false"):
        parse(Perhaps, ["--sure", "maybe"], "try", "")
