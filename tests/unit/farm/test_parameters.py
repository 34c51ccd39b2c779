from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NewType, Optional, TypedDict, Union

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.base.errors import TargetError, UnknownNameError, UsageError
from muster.farm.batched import batched
from muster.farm.parameters import Signature, convert_space, signature_of, to_call
from muster.farm.space import Space
from muster.farm.space_texts import Text

if TYPE_CHECKING:
    from nowhere import Missing  # type: ignore[import-not-found]


class Color(Enum):
    RED = "r"
    BLUE = "b"


class Level(IntEnum):
    LOW = 1
    HIGH = 2


Rate = NewType("Rate", float)


@dataclass(frozen=True)
class Optimizer:
    lr: float
    color: Color = Color.RED
    path: Path | None = None


@dataclass(frozen=True)
class Config:
    optimizer: Optimizer
    width: int = 8
    more: tuple[Optimizer, ...] = ()
    parent: Config | None = None


def taking(annotation: object) -> Signature:
    def target(x) -> None: ...  # type: ignore[no-untyped-def]

    target.__annotations__["x"] = annotation
    return signature_of(target)


GOOD: list[tuple[object, object, object, object]] = [
    # annotation, given, stored, argument
    (int, "3", 3, 3),
    (int, "1_000", 1000, 1000),
    (int, "1e4", 10000, 10000),
    (int, "-7", -7, -7),
    (int, 3.0, 3, 3),
    (int, "123456789012345678901234567890", 123456789012345678901234567890, None),
    (float, "1e-3", 0.001, 0.001),
    (float, "3", 3.0, 3.0),
    (float, 3, 3.0, 3.0),
    (float, "-inf", float("-inf"), float("-inf")),
    (bool, "true", True, True),
    (bool, "No", False, False),
    (bool, "1", True, True),
    (bool, "0", False, False),
    (bool, False, False, False),
    (str, "3", "3", "3"),
    (str, Text("none"), "none", "none"),
    (Path, "a/b", "a/b", Path("a/b")),
    (Path, Path("a/b"), "a/b", Path("a/b")),
    (Literal["adam", "sgd"], "sgd", "sgd", "sgd"),
    (Literal[1, "a"], "1", 1, 1),
    (Literal[1, True], True, True, True),
    (Literal[None, "x"], "null", None, None),
    (Color, "RED", "RED", Color.RED),
    (Color, "b", "BLUE", Color.BLUE),
    (Color, Color.BLUE, "BLUE", Color.BLUE),
    (Level, "2", "HIGH", Level.HIGH),
    (Level, 1, "LOW", Level.LOW),
    (Optional[int], "none", None, None),  # noqa: UP045
    (int | None, "Null", None, None),
    (int | None, "5", 5, 5),
    (int | None, None, None, None),
    (str | None, "none", None, None),
    (str | None, "abc", "abc", "abc"),
    (Path | None, "abc", "abc", Path("abc")),
    (Path | None, None, None, None),
    (Union[int, str], "5", 5, 5),  # noqa: UP007
    (int | str, "abc", "abc", "abc"),
    (int | float, "5", 5, 5),
    (int | float, "5.5", 5.5, 5.5),
    (float | int, "1e4", 1e4, 1e4),
    (int | float, 2.0, 2.0, 2.0),
    (bool | int, "1", 1, 1),
    (bool | str, "yes", True, True),
    (Color | None, "RED", "RED", Color.RED),
    (list[int], "[1, 2]", [1, 2], [1, 2]),
    (list[int], (1, 2), [1, 2], [1, 2]),
    (list[float], [1], [1.0], [1.0]),
    (list[Path], '["a"]', ["a"], [Path("a")]),
    (list, '[1, "a"]', [1, "a"], [1, "a"]),
    (Sequence[int], "[]", [], []),
    (tuple[int, str], '[1, "a"]', [1, "a"], (1, "a")),
    (tuple[int, ...], "[1, 2, 3]", [1, 2, 3], (1, 2, 3)),
    (tuple[Path, ...], ["a"], ["a"], (Path("a"),)),
    (list[list[int]], "[[1], [2]]", [[1], [2]], [[1], [2]]),
    (list[int] | None, "[1]", [1], [1]),
    (list[int] | None, "none", None, None),
    (dict[str, int], '{"a": 1}', {"a": 1}, {"a": 1}),
    (Rate, "0.5", 0.5, 0.5),
    (Optimizer, '{"lr": 1}', {"lr": 1.0}, Optimizer(1.0)),
    (
        Optimizer,
        {"lr": "1e-3", "color": "b"},
        {"lr": 0.001, "color": "BLUE"},
        Optimizer(0.001, Color.BLUE),
    ),
    (
        Optimizer,
        Optimizer(2, path=Path("a")),
        {"lr": 2.0, "color": "RED", "path": "a"},
        Optimizer(2.0, path=Path("a")),
    ),
    (
        Config,
        {"optimizer": {"lr": 1}, "more": [{"lr": 2}]},
        {"optimizer": {"lr": 1.0}, "more": [{"lr": 2.0}]},
        Config(Optimizer(1.0), more=(Optimizer(2.0),)),
    ),
    (Optimizer | None, {"lr": 1.0}, {"lr": 1.0}, Optimizer(1.0)),
    (Optimizer | None, "none", None, None),
    (list[Optimizer], [{"lr": 1.0}], [{"lr": 1.0}], [Optimizer(1.0)]),
    (Annotated[int, "units"], "5", 5, 5),
    (Any, Text("5"), 5, 5),
    (Any, Text("5.0"), 5.0, 5.0),
    (Any, Text("True"), True, True),
    (Any, Text("none"), None, None),
    (Any, Text("-inf"), float("-inf"), float("-inf")),
    (Any, Text("abc"), "abc", "abc"),
    (Any, Text("1"), 1, 1),
    (Any, "5", "5", "5"),
    (Any, 5, 5, 5),
    (Any, Path("a"), "a", "a"),
    (Any, (1, 2), [1, 2], [1, 2]),
    ("Missing", Text("5"), 5, 5),
    (Callable[[int], int], "f", "f", "f"),
]


def bind(signature: Signature, params: dict[str, Any]) -> dict[str, Any]:
    """One task's parameters in their stored form."""
    grid = tuple((name, (value,)) for name, value in params.items())
    (task,) = convert_space(Space(grid=grid), signature)
    return task


@pytest.mark.parametrize(("annotation", "value", "stored", "argument"), GOOD)
def test_values_by_annotation(
    annotation: object, value: object, stored: object, argument: object
) -> None:
    signature = taking(annotation)
    bound = bind(signature, {"x": value})
    assert repr(bound) == repr({"x": stored})
    assert type(bound["x"]) is type(stored)
    json.dumps(bound)
    if argument is not None or stored is None:
        assert repr(to_call(signature, bound)) == repr({"x": argument})


@pytest.mark.parametrize(
    ("annotation", "value", "message"),
    [
        (float, "abc", "Parameter x: cannot read 'abc' as float."),
        (float, True, "Parameter x: cannot read True as float."),
        (int, "3.5", "Parameter x: cannot read '3.5' as int."),
        (int, "1e20", "Parameter x: cannot read '1e20' as int."),
        (int, "inf", "Parameter x: cannot read 'inf' as int."),
        (int, True, "Parameter x: cannot read True as int."),
        (bool, "2", "Parameter x: cannot read '2' as bool."),
        (bool, 1, "Parameter x: cannot read 1 as bool."),
        (str, 3, "Parameter x: cannot read 3 as str."),
        (Literal["a", 1], "b", "Parameter x: cannot read 'b' as one of 'a', 1."),
        (Color, "GREEN", "Parameter x: cannot read 'GREEN' as Color (RED, BLUE)."),
        (int | None, "abc", "Parameter x: cannot read 'abc' as int | None."),
        (
            list[int],
            "8",
            "Parameter x: cannot read '8' as list[int].\n"
            "Hint: one list is written as JSON inside a list of values: "
            "--grid 'x=[[1, 2], [3]]'.",
        ),
        (
            tuple[int, ...],
            "a",
            "Parameter x: cannot read 'a' as tuple[int, ...].\n"
            "Hint: one list is written as JSON inside a list of values: "
            "--grid 'x=[[1, 2], [3]]'.",
        ),
        (
            tuple[int, str],
            "[1]",
            "Parameter x: cannot read '[1]' as tuple[int, str].\n"
            "Hint: one list is written as JSON inside a list of values: "
            "--grid 'x=[[1, 2], [3]]'.",
        ),
        (dict, "[1]", "Parameter x: cannot read '[1]' as dict."),
        (
            Any,
            Color.RED,
            "Parameter x: cannot store <Color.RED: 'r'> of type Color.\n"
            "Hint: annotate the parameter with its class (an Enum, a dataclass), or give numbers, "
            "strings or lists.",
        ),
        (
            Optimizer,
            {"lr": 1, "colour": "b"},
            "Parameter x: cannot read {'lr': 1, 'colour': 'b'} as Optimizer(lr: float, color: "
            "Color (RED, BLUE) = …, path: Path | None = …).\n"
            "Hint: Optimizer has no field 'colour', but lr, color, path.",
        ),
        (
            Optimizer | None,
            {"color": "b"},
            "Parameter x: cannot read {'color': 'b'} as Optimizer(lr: float, color: "
            "Color (RED, BLUE) = …, path: Path | None = …) | None.\n"
            "Hint: Optimizer needs a value for lr.",
        ),
        (
            Config,
            {"optimizer": {"lr": "fast"}},
            "Parameter x: cannot read {'optimizer': {'lr': 'fast'}} as Config(optimizer: "
            "Optimizer(lr: float, color: Color (RED, BLUE) = …, path: Path | None = …), "
            "width: int = …, more: tuple[Optimizer(lr: float, color: Color (RED, BLUE) = …, "
            "path: Path | None = …), ...] = …, parent: dict | None = …).\n"
            "Hint: Optimizer.lr: cannot read 'fast' as float.",
        ),
    ],
)
def test_values_that_do_not_fit(annotation: object, value: object, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        bind(taking(annotation), {"x": value})
    assert str(caught.value) == message


@given(st.floats() | st.integers() | st.text() | st.booleans() | st.none())
def test_binding_what_was_bound_changes_nothing(value: object) -> None:
    for annotation in (Any, int, float, str, int | None, float | str, bool | int, Path):
        signature = taking(annotation)
        try:
            once = bind(signature, {"x": value})
        except UsageError:
            continue
        assert repr(bind(signature, once)) == repr(once)


def train(lr: float, width: int = 8, *, seed: int, ctx: object = None) -> None: ...


def test_the_parts_of_a_signature() -> None:
    signature = signature_of(train)
    assert signature.names == ("lr", "width", "seed")
    assert signature.required == {"lr", "seed"}
    assert signature.takes_ctx and signature.takes_seed
    assert signature.extra is None and signature.batch is None


def test_one_bad_annotation_does_not_hide_the_others() -> None:
    def target(a: Missing, b: int) -> None: ...

    assert [p.kind.form for p in signature_of(target).parameters] == ["any", "int"]


def test_unknown_names_suggest_the_nearest() -> None:
    with pytest.raises(UnknownNameError) as caught:
        bind(signature_of(train), {"lr": 1, "seed": 0, "widht": 3})
    assert str(caught.value) == (
        "Unknown parameter 'widht'.\nHint: did you mean 'width'? Known: lr, seed, width."
    )


def test_missing_names_are_named() -> None:
    with pytest.raises(UsageError) as caught:
        bind(signature_of(train), {"width": 3})
    assert str(caught.value) == (
        "The target needs a value for lr, seed: without a default it cannot be called.\n"
        "Hint: add --grid lr=VALUE, or give the parameter a default."
    )
    with pytest.raises(UsageError, match=r"Hint: add --seeds 1, or give"):
        bind(signature_of(train), {"lr": 3})


def test_the_context_is_not_a_value() -> None:
    with pytest.raises(UsageError) as caught:
        bind(signature_of(train), {"ctx": 3})
    assert str(caught.value) == (
        "Parameter ctx cannot be given a value: muster passes the task's context there.\n"
        "Hint: give the parameter another name."
    )


def test_keyword_catch_all_takes_any_name() -> None:
    def target(**settings: float) -> None: ...

    assert bind(signature_of(target), {"a": "1", "seed": 2}) == {"a": 1.0, "seed": 2.0}


def positional(x: int, /) -> None: ...
def variadic(*xs: int) -> None: ...
async def waiting(x: int) -> None: ...


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            positional,
            "positional takes x (before the /), which can only be passed by position; tasks pass "
            "every parameter by name.\nHint: make it an ordinary parameter.",
        ),
        (
            variadic,
            "variadic takes *xs, which can only be passed by position; tasks pass every "
            "parameter by name.\nHint: make it an ordinary parameter.",
        ),
        (
            waiting,
            "waiting is an async function; a task is a plain call.\n"
            "Hint: wrap it: def task(...): return asyncio.run(...).",
        ),
    ],
)
def test_functions_that_tasks_cannot_call(function: Callable[..., Any], message: str) -> None:
    with pytest.raises(TargetError) as caught:
        signature_of(function)
    assert str(caught.value) == message


def test_a_wrapped_function_shows_its_own_parameters() -> None:
    @functools.wraps(train)
    def wrapper(*args: object, **kwargs: object) -> None: ...

    assert signature_of(wrapper) == signature_of(train)


def test_seeds_that_nobody_reads_are_refused() -> None:
    def target(lr: float) -> None: ...

    space = Space.from_texts(grid=["lr=1"], seeds="10")
    with pytest.raises(UsageError) as caught:
        convert_space(space, signature_of(target))
    assert str(caught.value) == (
        "10 seeds are given, but the target takes neither seed nor ctx: every seed would compute "
        "the same.\nHint: add a parameter seed to the function, or leave the seeds out."
    )


def test_a_seed_read_from_the_context_is_identity_but_no_argument() -> None:
    def target(ctx: object) -> None: ...

    signature = signature_of(target)
    (task,) = convert_space(Space.from_texts(seeds="1"), signature)
    assert task == bind(signature, task) == {"seed": 0}
    assert to_call(signature, task) == {}


def test_a_space_gets_its_types_at_once(tmp_path: Path) -> None:
    def target(lr: float, opt: str, out: Path, n: int, seed: int = 0) -> None: ...

    path = tmp_path / "p.csv"
    path.write_text("n\n1\n2\n")
    space = Space.from_texts(
        grid=["lr=1e-3,1"], zipped=["opt=1,2", "out=a,b"], list_file=path, seeds="2"
    )
    typed = convert_space(space, signature_of(target))
    assert len(typed) == 16
    assert next(iter(typed)) == {"n": 1, "opt": "1", "out": "a", "lr": 0.001, "seed": 0}
    signature = signature_of(target)
    for plain, task in zip(space, typed, strict=True):
        assert bind(signature, plain) == task


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"grid": ["widht=1"]}, "Unknown parameter 'widht'.\nHint: did you mean 'width'?"),
        ({"grid": ["lr=abc"], "seeds": "1"}, "Parameter lr: cannot read 'abc' as float."),
        ({"grid": ["width=1"], "seeds": "1"}, "The target needs a value for lr: "),
        (
            {"grid": ["lr=1e-3,0.001"], "seeds": "1"},
            "grid lr holds 1e-3 and 0.001, which are the same value: the tasks would be "
            "identical and run once.",
        ),
    ],
)
def test_spaces_that_do_not_fit(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        convert_space(Space.from_texts(**arguments), signature_of(train))
    assert str(caught.value).startswith(message)


def test_a_row_may_leave_out_only_what_has_a_default() -> None:
    signature = signature_of(train)
    rows = [{"lr": 1, "width": 2}, {"lr": 2}]
    first, second = convert_space(Space.from_values(rows=rows, seeds=1), signature)
    assert (first, second) == ({"lr": 1.0, "width": 2, "seed": 0}, {"lr": 2.0, "seed": 0})
    with pytest.raises(UsageError) as caught:
        convert_space(Space.from_values(rows=[*rows, {"width": 2}], seeds=1), signature)
    assert str(caught.value) == (
        "Row 3 of rows leaves out lr, which has no default.\n"
        "Hint: give lr in every row, or give it a default in the function."
    )


@dataclass
class Setting:
    lr: float
    depth: int = 2


class Typed(TypedDict):
    lr: float
    depth: int


@pytest.mark.parametrize("params", [Setting, Typed, {"lr": float, "depth": int}])
def test_batched_functions_declare_the_parameters_of_one_task(params: Any) -> None:
    @batched(static=("depth",), max_batch=8, params=params)
    def target(tasks: list[dict[str, Any]], ctx: object) -> list[float]:
        return []

    signature = signature_of(target)
    assert signature.batch is not None
    assert (signature.batch.static, signature.batch.max_batch) == (("depth",), 8)
    assert signature.takes_ctx
    assert bind(signature, {"lr": "1", "depth": "3"}) == {"lr": 1.0, "depth": 3}
    with pytest.raises(UnknownNameError):
        bind(signature, {"lr": 1, "depth": 3, "x": 1})


def test_batched_functions_without_declaration_take_any_name() -> None:
    @batched()
    def target(tasks: list[dict[str, Any]]) -> list[float]:
        return [task["x"] for task in tasks]

    assert target([{"x": 1.0}]) == [1.0]
    assert bind(signature_of(target), {"x": Text("1"), "seed": 3}) == {"x": 1, "seed": 3}


def test_mistakes_in_the_batched_mark() -> None:
    with pytest.raises(TargetError) as caught:
        batched(static="lr")
    assert str(caught.value) == (
        "@batched(static='lr'): static is a sequence of names, not one string.\n"
        "Hint: write static=('lr',)."
    )
    with pytest.raises(TargetError, match=r"@batched\(max_batch=0\): the largest batch is"):
        batched(max_batch=0)

    @batched(static=("dept",), params=Setting)
    def misspelt(tasks: list[Any]) -> None: ...

    with pytest.raises(UnknownNameError, match="static parameter of misspelt 'dept'"):
        signature_of(misspelt)

    @batched()
    def two(lr: float, width: int) -> None: ...

    with pytest.raises(TargetError) as caught:
        signature_of(two)
    assert str(caught.value) == (
        "The batched function two takes lr, width; it takes one list of parameter dicts, and ctx "
        "if it likes.\nHint: write def two(tasks, ctx): and read task['name'] for each task."
    )


@pytest.mark.parametrize("annotation", [row[0] for row in GOOD])
def test_a_signature_can_be_sent_as_json(annotation: object) -> None:
    signature = taking(annotation)
    assert Signature.from_record(json.loads(json.dumps(signature.to_record()))) == signature


def test_a_whole_signature_can_be_sent_as_json() -> None:
    @batched(static=("lr",))
    def target(tasks: list[Any], ctx: object) -> None: ...

    for function in (train, target):
        signature = signature_of(function)
        assert Signature.from_record(json.loads(json.dumps(signature.to_record()))) == signature
