"""What a space may be: its texts, its conditions, its errors."""

from __future__ import annotations

from random import Random
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples

from muster.base.errors import UsageError
from muster.search.distributions import Choice, Float, Int
from muster.search.search import Search
from muster.search.space import Space
from muster.search.spec import (
    Budget,
    Constraint,
    SearchSpec,
    Stopping,
    objectives,
)


@pytest.mark.parametrize(
    ("text", "distribution"),
    [
        ("lr=log(1e-5,1e-1)", Space.log(1e-5, 1e-1)),
        ("lr = log( 1e-5 , 1e-1 )", Space.log(1e-5, 1e-1)),
        ("x=uniform(0,1)", Space.uniform(0, 1)),
        ("x=uniform(0,1,step=0.25)", Space.uniform(0, 1, step=0.25)),
        ("width=int(16,256,step=16)", Space.int(16, 256, step=16)),
        ("width=int(1,8)", Space.int(1, 8)),
        ("width=logint(1,1024)", Space.logint(1, 1024)),
        ("opt=choice(adam,sgd)", Space.choice("adam", "sgd")),
        ('x=choice(1,1.0,true,null,"1")', Space.choice(1, 1.0, True, None, "1")),
        ("x=choice([1,2],[3])", Space.choice([1, 2], [3])),
        ('x=choice("a,b","c")', Space.choice("a,b", "c")),
        ('x=choice("say if you can","a \\" if b")', Space.choice("say if you can", 'a " if b')),
        ("n=int(0,9223372036854775807)", Space.int(0, 2**63 - 1)),
        ("n=int(1e3,2e3)", Space.int(1000, 2000)),
    ],
)
def test_texts_mean_distributions_and_come_back(text: str, distribution: Any) -> None:
    space = Space.from_texts([text])
    assert space.axes[0].distribution == distribution
    assert Space.from_json(space.to_json()) == space


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["lr"], "does not begin with the name"),
        (["model lr=log(1,2)"], "'model lr' is not a parameter name"),
        (["--lr=log(1,2)"], "did you mean 'lr'"),
        (["lr=0.1"], r"lr=0.1 is not a distribution.*\n.*choice\(0.1\)"),
        (["lr=logarithmic(1,2)"], r"Unknown distribution of lr 'logarithmic'.\n.*choice, int, log"),
        (["lr=log(0,1)"], "starts above 0"),
        (["lr=log(1)"], "needs a low end, a high end"),
        (["lr=log(1,x)"], "'x', which is not a number"),
        (["lr=log(1,nan)"], "nan, which is not a finite number"),
        (["lr=log(2,1)"], "2.0 is not below 1.0"),
        (["n=int(1,2.5)"], "'2.5', which is not a whole number"),
        (["n=int(1,8,by=2)"], "unknown option 'by'"),
        (["n=int(1,8,step=0)"], "not above 0"),
        (["n=int(1,8,step=9)"], "1 is the only value"),
        (["n=choice()"], "has no values"),
        (["n=choice(a,a)"], "has a twice"),
        (["n=choice(a)", "n=choice(b)"], "gives n twice"),
        ([], "is empty"),
        (["m=uniform(0,1) if opt=sgd"], "Unknown parameter in the condition of m 'opt'"),
        (["opt=choice(a,b)", "m=uniform(0,1) if opt=c"], "opt=c, which opt=.* never is"),
        (["opt=choice(a,b)", "m=uniform(0,1) if opt"], "is not NAME=VALUE"),
        (["a=choice(x) if b=x", "b=choice(x) if a=x"], "depend on each other in a circle"),
    ],
)
def test_a_wrong_text_is_told_what_is_allowed(texts: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=f"(?s){message}"):
        Space.from_texts(texts)


@pytest.mark.parametrize("name", ["lr", "model.lr", "learning-rate", "optim/sgd.lr", "größe"])
def test_names_are_those_of_a_sweep(name: str) -> None:
    space = Space.from_texts([f"{name}=log(1,2)", f"b=int(1,2) if {name}=1"])
    assert space.names == (name, "b")
    assert Space.from_json(space.to_json()) == space


def test_a_condition_decides_whether_there_is_a_parameter() -> None:
    space = Space.from_texts(
        [
            "momentum=uniform(0,0.99) if opt=sgd,nag if big=true",
            "opt=choice(adam,sgd,nag)",
            "big=choice(true,false)",
        ]
    )
    assert space.names == ("opt", "big", "momentum")
    drawn = [space.draw(Random(n)) for n in range(200)]
    for params in drawn:
        assert ("momentum" in params) == (params["opt"] != "adam" and params["big"] is True)
        assert space.check(params) == params
    assert {len(params) for params in drawn} == {2, 3}
    with pytest.raises(UsageError, match="momentum is given, but is there only if opt=sgd,nag and"):
        space.check({"opt": "adam", "big": True, "momentum": 0.5})


def test_a_condition_may_be_for_any_text() -> None:
    space = Space.from_texts(
        ['how=choice("ask if unsure",guess)', 'n=int(1,2) if how="ask if unsure"']
    )
    assert Space.from_json(space.to_json()) == space
    assert all(("n" in params) == (params["how"] != "guess") for params in space.settings())


def test_the_settings_of_a_space_that_can_be_counted() -> None:
    space = Space.from_texts(
        ["a=choice(x,y)", "b=int(1,5,step=2)", "c=uniform(0,1,step=0.5) if a=y"]
    )
    settings = list(space.settings())
    assert space.size == len(settings) == 3 + 9
    assert {tuple(s.items()) for s in settings} == {
        *((("a", "x"), ("b", b)) for b in (1, 3, 5)),
        *((("a", "y"), ("b", b), ("c", c)) for b in (1, 3, 5) for c in (0.0, 0.5, 1.0)),
    }
    assert Space.from_texts(["a=choice(x)", "lr=log(1,2)"]).size is None


def test_settings_that_are_hardly_ever_drawn_are_tried_too() -> None:
    goal = objectives(minimize=["loss"])
    rare = Space.from_texts(["a=int(1,400)", "b=int(1,1000000) if a=1"])
    search = Search(SearchSpec(space=rare, objectives=goal, budget=Budget(trials=500)))
    assert len({str(one.params) for one in search.ask(600)}) == 500
    few = Space.from_texts([*(f"p{n}=int(1,9) if p{n - 1}=1" for n in range(1, 7)), "p0=int(1,9)"])
    search = Search(SearchSpec(space=few, objectives=goal, budget=Budget(trials=500)))
    assert few.size is None and len(search.ask(600)) == 9 + 6 * 8
    assert search.is_exhausted()


def test_a_range_with_steps_holds_its_steps_only() -> None:
    own = Space.uniform(0, 1, step=0.1)
    assert all(own.holds(value) for value in (0, 0.3, 0.1 + 0.2, 1.0))
    assert not own.holds(0.15) and not own.holds(True) and not own.holds("0.1")


def test_annotations_are_a_space() -> None:
    def train(
        lr: Annotated[float, Space.log(1e-5, 1e-1)],
        layers: Annotated[int, Space.int(1, 4)] = 2,
        name: str = "x",
    ) -> None: ...

    def plain(x: int) -> None: ...

    assert Space.of_function(train) == Space.from_values(
        {"lr": Space.log(1e-5, 1e-1), "layers": Space.int(1, 4)}
    )
    assert Space.of_function(plain) is None


numbers = st.floats(-1e6, 1e6, allow_nan=False)
floats = st.tuples(numbers, numbers).filter(lambda p: p[0] < p[1]).map(lambda p: Float(*p))
logs = st.tuples(st.floats(1e-9, 1), st.floats(1.5, 1e6)).map(lambda p: Float(*p, log=True))
ints = st.tuples(st.integers(-99, 99), st.integers(1, 99), st.integers(1, 9)).map(
    lambda p: Int(p[0], p[0] + p[1], step=min(p[1], p[2]))
)
values = st.one_of(st.none(), st.booleans(), st.integers(), numbers, st.text())
choices = st.lists(values, min_size=1, max_size=5, unique_by=repr).map(lambda v: Choice(tuple(v)))


@examples(60)
@given(st.lists(st.one_of(floats, logs, ints, choices), min_size=1, max_size=4), st.integers(0))
def test_any_space_survives_json_and_holds_what_it_draws(found: list[Any], seed: int) -> None:
    space = Space.from_values({f"p{at}": own for at, own in enumerate(found)})
    assert Space.from_json(space.to_json()) == space
    params = space.draw(Random(seed))
    assert space.check(params) == params


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Stopping.from_text("ahsa"), "Unknown early stopping 'ahsa'.*\n.*'asha'"),
        (lambda: Stopping.from_text("asha:mx=3"), "Unknown option of asha 'mx'"),
        (lambda: Stopping.from_text("asha:eta=x"), "eta is 'x', which is not a whole number"),
        (lambda: Stopping.from_text("hyperband"), "needs the last step"),
        (lambda: Stopping.from_text("asha:min=9,max=3"), "lies before the first"),
        (lambda: Stopping.from_text("asha:max=inf"), "must be finite"),
        (lambda: Stopping.from_text("median:every=inf"), "above 0 and finite"),
        (lambda: Constraint.from_text("a<3"), "is not NAME<=NUMBER"),
        (lambda: Constraint.from_text("a<=nan"), "is not NAME<=NUMBER"),
        (lambda: Budget(trials=0), "trials must be above 0"),
    ],
)
def test_wrong_specifications(make: Any, message: str) -> None:
    with pytest.raises(UsageError, match=f"(?s){message}"):
        make()


def test_a_specification_survives_json() -> None:
    spec = SearchSpec(
        space=Space.from_texts(["lr=log(1e-5,1e-1)", "opt=choice(adam,sgd)"]),
        objectives=objectives(maximize=["accuracy"]),
        sampler="tpe",
        seed=3,
        budget=Budget(trials=20, seconds=3600, cost=1.5),
        seeds=(0, 1, 5),
        tries=({"lr": 1e-3}, {"opt": "sgd"}),
        constraints=(Constraint.from_text("latency_ms<=20"),),
        stopping=Stopping.from_text("asha:min=2,max=81,eta=4"),
    )
    assert SearchSpec.from_json(spec.to_json()) == spec
    with pytest.raises(UsageError, match="compares trials by one number"):
        SearchSpec(
            space=spec.space,
            objectives=objectives(minimize=["a", "b"]),
            stopping=Stopping(rule="asha"),
        )
    with pytest.raises(UsageError, match="first guess lr=5 is not in log"):
        SearchSpec(space=spec.space, objectives=spec.objectives, tries=({"lr": 5},))
