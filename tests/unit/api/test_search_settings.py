"""Settings of a search as tasks: what is refused, what is taken over, what runs one again."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples

from muster.api.sweeps.search import (
    _check_conditions,
    _conversions,
    _example,
    search_of_command,
)
from muster.api.sweeps.search_options import SearchOptions
from muster.api.sweeps.search_state import SearchState, again
from muster.api.sweeps.workload import as_texts
from muster.base.errors import UsageError
from muster.farm import space as farm_space
from muster.farm.canonical import encode_canonical
from muster.farm.kinds import kind_of
from muster.farm.parameters import Parameter, Signature, convert_space
from muster.farm.task import TargetSpec
from muster.search.records import Decision, Ending, Point
from muster.search.search import Search
from muster.search.space import Space
from muster.search.spec import SearchSpec, Stopping, objectives


def spec_of(*texts: str, **others: Any) -> SearchSpec:
    space = others.pop("space", None) or Space.from_texts(texts)
    return SearchSpec(space=space, objectives=objectives(minimize=["v"]), **others)


values = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**53), 2**53), st.text(),
    st.floats(allow_nan=False, allow_infinity=False), st.lists(st.integers(0, 9), max_size=3),
    st.sampled_from(["none", "1", "true", "nan", "a,b", "'x'", " x ", "[8]", "-x", "1e-3", "adam"]),
)  # fmt: skip


@pytest.mark.parametrize("kind", ["function", "command"])
@examples(100)
@given(value=values)
def test_the_printed_command_runs_the_task_of_the_setting(kind: str, value: Any) -> None:
    signature = Signature((Parameter("x"),)) if kind == "function" else None
    spec = spec_of(space=Space.from_values({"x": Space.choice(value)}))
    target = {"kind": kind, "name": "f.py:f", "argv": ["echo", "{x}"]}
    words = shlex.split(again(target, spec, {"x": value}))
    grid = farm_space.Space.from_texts(grid=[words[words.index("--grid") + 1]])
    [read] = as_texts(grid) if signature is None else convert_space(grid, signature)
    stored, _ = _conversions(spec, signature)
    assert encode_canonical(read) == encode_canonical(stored({"x": value}))


def test_the_printed_command_finds_its_numbers_where_the_search_did() -> None:
    target = {"kind": "command", "argv": ["echo", "{x}"], "metrics_from": "stdout:v=(?P<v>.*)"}
    words = shlex.split(again(target, spec_of("x=int(1,9)"), {"x": 3}))
    assert words[words.index("--metrics-from") + 1] == "stdout:v=(?P<v>.*)"
    assert words[-3:] == ["--", "echo", "{x}"]


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["x=choice(1,2,large)"], "Parameter x: cannot read 'large' as"),
        (["x=int(1,9)", "y=choice(a,b)", "z=choice(c)"], "Unknown parameter 'z'"),
    ],
)
def test_a_value_that_the_function_cannot_take_is_told_before(
    texts: list[str], message: str
) -> None:
    signature = Signature((Parameter("x", True, kind_of(int)), Parameter("y", False)))
    with pytest.raises(UsageError, match=message):
        convert_space(_example(spec_of(*texts)), signature)


def test_a_parameter_that_is_there_sometimes_may_be_left_out() -> None:
    texts = ("opt=choice(a,b)", "m=uniform(0,1) if opt=b")
    target = TargetSpec(name="f.py:f")
    for required in (False, True):
        signature = Signature((Parameter("opt"), Parameter("m", required)))
        if not required:
            _check_conditions(spec_of(*texts), target, signature)
            continue
        with pytest.raises(UsageError, match=r"m is there only if opt=b, but has no default in f"):
            _check_conditions(spec_of(*texts), target, signature)
    options = SearchOptions(space=texts, minimize=("v",), trials=3)
    with pytest.raises(UsageError, match=r"the command always holds \{m\}"):
        search_of_command(["echo", "{opt}", "{m}"], options, None, shell=False)
    search_of_command(["echo $MUSTER_PARAMS"], options, None, shell=True)


@pytest.mark.parametrize("signature", [None, Signature((Parameter("x"), Parameter("y", False)))])
def test_a_task_with_another_parameter_is_no_setting_of_the_space(
    signature: Signature | None,
) -> None:
    _, setting = _conversions(spec_of("x=int(1,9)"), signature)
    assert setting({"x": 3}) == {"x": 3}
    assert setting({"x": 3, "y": 1}) is None
    assert setting({"x": 3, "seed": 0}) is None


def test_who_finished_is_not_counted_at_the_rung_where_it_was_to_pause() -> None:
    spec = spec_of("x=uniform(0,1)", stopping=Stopping.from_text("asha:max=9"))
    search = Search(spec)
    search.ask(2)
    decisions: list[Decision] = []
    for number in range(2):
        decisions += search.heard(number, None, [Point("v", 1, 0.5)])
    search.ended(0, None, Ending("done", {"v": 0.4}))
    state = SearchState(
        spec=spec, search=search, decisions=tuple(decisions), decided_s=(None,) * len(decisions),
        ended=(0,), tasks={}, spent_s=0.0, gpu_hours=0.0,
    )  # fmt: skip
    assert state.num_by_rung == {1: 1}
