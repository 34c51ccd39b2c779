from __future__ import annotations

import itertools
import json
import math
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.examples import examples

from muster.base.errors import UsageError
from muster.farm.canonical import encode_canonical
from muster.farm.space import Space
from muster.farm.space_difference import describe_difference
from muster.farm.space_texts import Text, parse_grid, parse_seeds, read_list

pools = st.lists(st.integers() | st.text(), min_size=1, max_size=4, unique_by=repr)


def test_no_space_is_one_task_without_parameters() -> None:
    assert list(Space()) == [{}]
    assert len(Space()) == 1


def test_every_setting_gets_its_first_seed_before_any_gets_its_second() -> None:
    space = Space.from_values(
        rows=[{"data": "a"}, {"data": "b"}],
        zipped={"depth": [1, 2], "width": [10, 20]},
        grid={"lr": [0.1, 0.2]},
        seeds=2,
    )
    tasks = list(space)
    assert len(tasks) == len(space) == 16
    assert [task["seed"] for task in tasks] == [0] * 8 + [1] * 8
    assert tasks[:5] == [
        {"data": "a", "depth": 1, "width": 10, "lr": 0.1, "seed": 0},
        {"data": "a", "depth": 1, "width": 10, "lr": 0.2, "seed": 0},
        {"data": "a", "depth": 2, "width": 20, "lr": 0.1, "seed": 0},
        {"data": "a", "depth": 2, "width": 20, "lr": 0.2, "seed": 0},
        {"data": "b", "depth": 1, "width": 10, "lr": 0.1, "seed": 0},
    ]
    assert space.names == ("data", "depth", "width", "lr", "seed")


@given(st.dictionaries(st.sampled_from("abc"), pools), st.none() | st.integers(1, 3))
def test_the_length_is_known_and_tasks_are_distinct(
    grid: dict[str, list[object]], seeds: int | None
) -> None:
    space = Space.from_values(grid=grid, seeds=seeds)
    tasks = [repr(sorted(task.items())) for task in space]
    assert len(tasks) == len(space) == len(set(tasks))


values = st.one_of(
    st.integers(), st.floats(), st.text(), st.none(), st.booleans(),
    st.sampled_from(["$a", "\udc80"]),
    st.dictionaries(st.sampled_from(["$a", "b", "é"]), st.floats(), max_size=2),
)  # fmt: skip
axes = st.lists(values, min_size=1, max_size=6, unique_by=lambda value: encode_canonical(value))


@given(
    st.dictionaries(st.sampled_from(["a", "lr", "sea", "shape", "_b"]), axes, max_size=3),
    st.none() | axes,
    st.none() | axes,
    st.none() | st.integers(1, 6),
)
@example({"lr": [1, 2, 3, 4]}, None, None, None)
@example({}, None, None, 5)
@example({}, [1, 2, 3, 4], None, 5)
@examples(200)
def test_tasks_encoded_along_an_axis_are_the_tasks_encoded(
    grid: dict[str, list[Any]],
    zipped: list[Any] | None,
    listed: list[Any] | None,
    seeds: int | None,
) -> None:
    rows = listed and [{"p": value} | ({"q": 1} if i % 2 else {}) for i, value in enumerate(listed)]
    paired = {"m": zipped, "z": list(range(len(zipped)))} if zipped else None
    space = Space.from_values(grid=grid, zipped=paired, rows=rows, seeds=seeds)
    assert list(space.payloads()) == [encode_canonical(task) for task in space]


def test_long_axes_are_not_kept_encoded() -> None:
    space = Space.from_values(grid={"a": [1.0, math.nan], "b": range(30_000)}, seeds=1)
    assert list(space.payloads()) == [encode_canonical(task) for task in space]


def test_a_huge_space_is_never_listed() -> None:
    space = Space.from_values(grid={"a": range(1000), "b": range(1000)}, seeds=10**6)
    assert len(space) == 10**12
    assert list(itertools.islice(space, 2)) == [
        {"a": 0, "b": 0, "seed": 0},
        {"a": 0, "b": 1, "seed": 0},
    ]


def test_each_task_is_a_dict_of_its_own() -> None:
    tasks = list(Space.from_values(seeds=3))
    assert tasks == [{"seed": 0}, {"seed": 1}, {"seed": 2}]


@pytest.mark.parametrize(
    ("text", "name", "values"),
    [
        ("lr=1e-3,1e-2", "lr", ["1e-3", "1e-2"]),
        (" lr = 1 , 2 ", "lr", ["1", "2"]),
        ("model.depth=3", "model.depth", ["3"]),
        ("tag='a,b',c", "tag", ["a,b", "c"]),
        ("tag=c,\"a,'b'\"", "tag", ["c", "a,'b'"]),
        ("tag='',x", "tag", ["", "x"]),
        ("tag=don't,x=y", "tag", ["don't", "x=y"]),
        ('x=[1,2.5,"a,b",null,true]', "x", [1, 2.5, "a,b", None, True]),
        ("dims=[[8,16],[32]]", "dims", [[8, 16], [32]]),
    ],
)
def test_grid_texts(text: str, name: str, values: list[object]) -> None:
    assert parse_grid(text) == (name, values)


def test_only_bare_values_may_still_get_a_type() -> None:
    _, values = parse_grid("x=1,'1'")
    assert [type(value) for value in values] == [Text, str]
    _, values = parse_grid('x=["1"]')
    assert [type(value) for value in values] == [str]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "lr",
            "Cannot read 'lr' as parameter values: there is no '='.\nHint: write lr=VALUE,VALUE.",
        ),
        ("lr=", "Parameter lr has no values in 'lr='.\nHint: write lr=VALUE,VALUE."),
        ("lr=[]", "Parameter lr has no values in '[]'.\nHint: write lr=VALUE,VALUE."),
        (
            "lr=1,,2",
            "Parameter lr has an empty value in '1,,2'.\n"
            "Hint: remove the extra comma, or write '' in quotes for an empty string.",
        ),
        (
            "lr=1,",
            "Parameter lr has an empty value in '1,'.\n"
            "Hint: remove the extra comma, or write '' in quotes for an empty string.",
        ),
        ("--lr=1", "'--lr' is not a parameter name.\nHint: did you mean 'lr'?"),
        (
            "1r=1",
            "'1r' is not a parameter name.\n"
            "Hint: a name starts with a letter or '_' and has no spaces.",
        ),
        (
            "t='a,b",
            "Parameter t: a quote ' is opened and never closed in \"'a,b\".\n"
            "Hint: close it, and put the whole option in the other kind of quotes so that the "
            "shell leaves them alone.",
        ),
        (
            "t='a'b,c",
            "Parameter t: 'b' follows a closing quote in \"'a'b,c\".\n"
            "Hint: put a comma between two values.",
        ),
        (
            "t=[a,b]",
            "Parameter t: cannot read '[a,b]' as a JSON list (Expecting value: line 1 column 2 "
            '(char 1)).\nHint: strings in a JSON list have double quotes: ["a", "b"].',
        ),
    ],
)
def test_grid_texts_that_are_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_grid(text)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("text", "offset", "seeds"),
    [
        ("3", 0, [0, 1, 2]),
        ("3", 100, [100, 101, 102]),
        ("3,5,8", 0, [3, 5, 8]),
        ("3,5", 10, [13, 15]),
        ("10:13", 0, [10, 11, 12]),
        ("10:12", 5, [15, 16]),
        ("5,3", -3, [2, 0]),
        ("3,", 0, [3]),
        ("3:4", 0, [3]),
    ],
)
def test_seed_texts(text: str, offset: int, seeds: list[int]) -> None:
    assert list(parse_seeds(text, offset)) == seeds


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "abc",
            "Cannot read 'abc' as seeds.\n"
            "Hint: write a count (100), a list (3,5,8; one seed: 3,) or a range (10:20, "
            "without 20).",
        ),
        (
            "1:2:3",
            "Cannot read '1:2:3' as seeds.\n"
            "Hint: write a count (100), a list (3,5,8; one seed: 3,) or a range (10:20, "
            "without 20).",
        ),
        ("0", "No seeds in '0'.\nHint: give a count of 1 or more, or a range like 0:10."),
        ("5:5", "No seeds in '5:5'.\nHint: give a count of 1 or more, or a range like 0:10."),
        ("-1,2", "Negative seed -1 in '-1,2'.\nHint: generators take seeds from 0 on."),
        (
            "1,2,1",
            "Seed 1 is given twice in '1,2,1': both would compute the same.\n"
            "Hint: remove one of them.",
        ),
    ],
)
def test_seed_texts_that_are_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_seeds(text)
    assert str(caught.value) == message


def test_an_offset_that_makes_seeds_negative_is_named() -> None:
    with pytest.raises(UsageError, match="Negative seed -5 in '3' with offset -5"):
        parse_seeds("3", -5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"grid": ["lr=1", "lr=2"]},
            "Parameter lr is given twice, in grid.\n"
            "Hint: a parameter gets its values in one place; put all of them there.",
        ),
        (
            {"grid": ["lr=1"], "zipped": ["lr=2"]},
            "Parameter lr is given twice, in zip and grid.\n"
            "Hint: a parameter gets its values in one place; put all of them there.",
        ),
        (
            {"grid": ["seed=1"], "seeds": "3"},
            "Parameter seed is given twice, in grid and seeds.\n"
            "Hint: a parameter gets its values in one place; put all of them there.",
        ),
        (
            {"zipped": ["a=1,2", "b=1,2,3"]},
            "zip needs the same number of values for each name: a has 2, b has 3.\n"
            "Hint: zip pairs the first values, then the second; use grid for all combinations.",
        ),
        (
            {"grid": ["lr=1,2,1"]},
            "grid lr holds 1 twice: the tasks would be identical and run once.\n"
            "Hint: remove one of them; to repeat a setting use --seeds.",
        ),
        (
            {"zipped": ["a=1,1", "b=2,2"]},
            "zip a, b holds 1, 2 twice: the tasks would be identical and run once.\n"
            "Hint: remove one of them; to repeat a setting use --seeds.",
        ),
    ],
)
def test_spaces_that_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        Space.from_texts(**arguments)  # type: ignore[arg-type]
    assert str(caught.value) == message


def test_zip_may_repeat_a_value_but_not_a_pair() -> None:
    assert len(Space.from_texts(zipped=["a=1,1", "b=2,3"])) == 2


def test_python_values_keep_their_types() -> None:
    space = Space.from_values(grid={"x": [1, 1.0, True, "1", None]})
    assert [repr(task["x"]) for task in space] == ["1", "1.0", "True", "'1'", "None"]


def test_numpy_values_become_python_values() -> None:
    numpy = pytest.importorskip("numpy")
    space = Space.from_values(grid={"x": numpy.array([0.5, 1.5])}, seeds=numpy.arange(2))
    assert repr(next(iter(space))) == "{'x': 0.5, 'seed': 0}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"grid": {"x": 3}}, "grid x is 3, not a list of values.\nHint: write [3]."),
        ({"grid": {"x": "ab"}}, "grid x is 'ab', not a list of values.\nHint: write ['ab']."),
        ({"grid": {"x": []}}, "grid x has no values.\nHint: give at least one value."),
        ({"rows": []}, "rows is empty.\nHint: give one row for each setting."),
        ({"seeds": [1.5]}, "The seed 1.5 is not an integer.\nHint: seeds=[0, 1, 2]"),
        (
            {"seeds": 0},
            "No seeds in 0.\nHint: give a count of 1 or more, or a range like 0:10.",
        ),
    ],
)
def test_python_values_that_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        Space.from_values(**arguments)  # type: ignore[arg-type]
    assert str(caught.value) == message


def write(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@pytest.mark.parametrize(
    "content",
    ["lr,tag\n0.1,a\n0.2,b\n", "\ufefflr, tag\r\n0.1, a\r\n\r\n0.2,b", 'lr,tag\n"0.1",a\n0.2,b'],
)
def test_csv_lists(tmp_path: Path, content: str) -> None:
    space = Space.from_texts(list_file=write(tmp_path, "p.csv", content))
    assert list(space) == [{"lr": "0.1", "tag": "a"}, {"lr": "0.2", "tag": "b"}]


def test_jsonl_lists_may_leave_names_out(tmp_path: Path) -> None:
    path = write(tmp_path, "p.jsonl", '{"lr": 0.1}\n\n{"lr": NaN, "dims": [1, 2]}\n')
    first, second = Space.from_texts(list_file=path)
    assert first == {"lr": 0.1}
    assert repr(second) == "{'lr': nan, 'dims': [1, 2]}"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.csv", "a,b\n1,2\n3\n", "{path} line 3 has 1 cells, the header has 2."),
        ("p.csv", "a,b\n1,\n", "{path} line 2: the cell of b is empty."),
        ("p.csv", "a,a\n1,2\n", "The list {path} has two columns named 'a'."),
        ("p.csv", "a,b\n", "The list {path} has no rows."),
        ("p.csv", "", "The list {path} has no rows."),
        ("p.csv", "a b\n1\n", "'a b' is not a parameter name."),
        ("p.csv", b"a\n\xff\n", "Cannot read the list {path}: it is not UTF-8 (byte 2)."),
        ("p.csv", "a\n1\n1\n", "list p.csv holds 1 twice: the tasks would be identical"),
        ("p.jsonl", "{}\n[1]\n", "{path} line 2 is not an object but '[1]'."),
        ("p.jsonl", "{\n", "{path} line 1 is not JSON: "),
        ("p.txt", "", "Cannot read the list {path}: its name ends in '.txt'."),
    ],
)
def test_lists_that_are_refused(
    tmp_path: Path, name: str, content: str | bytes, message: str
) -> None:
    path = write(tmp_path, name, content)
    with pytest.raises(UsageError) as caught:
        Space.from_texts(list_file=path)
    assert str(caught.value).startswith(message.format(path=path))


def test_a_list_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"Cannot read the list .*x.csv: No such file"):
        read_list(tmp_path / "x.csv")


def test_the_specification_is_small_and_json(tmp_path: Path) -> None:
    path = write(tmp_path, "p.csv", "a\n1\n2\n")
    space = Space.from_texts(grid=["lr=1e-3,1e-2"], zipped=["w=1"], list_file=path, seeds="100")
    assert json.loads(json.dumps(space.to_spec())) == {
        "grid": {"lr": ["1e-3", "1e-2"]},
        "zip": {"w": ["1"]},
        "list": {
            "source": "p.csv",
            "rows": 2,
            "names": ["a"],
            "sha256": sha256(b"a\n1\n2\n").hexdigest(),
        },
        "seeds": "0:100",
    }
    large = Space.from_values(grid={"x": range(10**5)}, seeds=range(0, 10**6, 2)).to_spec()
    assert len(json.dumps(large)) < 300


@pytest.mark.parametrize(
    ("old", "new", "lines"),
    [
        ({"grid": ["lr=1"]}, {"grid": ["lr=1"]}, []),
        (
            {"grid": ["lr=1e-3,1e-2"]},
            {"grid": ["lr=1e-3"]},
            ["grid lr: 1e-3, 1e-2 -> 1e-3"],
        ),
        (
            {"grid": ["lr=1"]},
            {"zipped": ["lr=1"]},
            ["grid lr: 1 -> (absent)", "zip lr: (absent) -> 1"],
        ),
        ({"seeds": "100"}, {"seeds": "3,5"}, ["seeds: 0:100 -> 3,5"]),
        ({}, {"seeds": "1"}, ["seeds: (absent) -> 0:1"]),
    ],
)
def test_differences_between_plans(
    old: dict[str, object], new: dict[str, object], lines: list[str]
) -> None:
    specs = [Space.from_texts(**arguments).to_spec() for arguments in (old, new)]  # type: ignore[arg-type]
    assert describe_difference(*specs) == lines


def test_a_changed_list_is_shown_by_its_content() -> None:
    old, new = (Space.from_values(rows=[{"a": value}]).to_spec() for value in (1, 2))
    (line,) = describe_difference(old, new)
    assert line.startswith("list: rows (1 rows of a; sha256 ")


@pytest.mark.parametrize(
    ("name", "before", "now", "holds"),
    [
        ("a.jsonl", '{"x": 1}\n{"x": 2}\n', '{"x": 1}\n{"x": 2}\n{"x": 3}\n', True),
        ("a.jsonl", '{"x": 1}\n{"x": 2}', '{"x": 1}\n{"x": 2}\n{"x": 3}\n', True),
        ("a.csv", "x,y\r\n1,2\r\n", "x,y\r\n1,2\r\n3,4\r\n", True),
        ("a.csv", "x,y\n1,2\n", "x,y\n1,3\n1,2\n", False),
        ("a.csv", "x,y\n1,2\n3,4\n", "x,y\n1,2\n", False),
        ("a.jsonl", '{"x": 1}\n', '{"x": 1}\n{"y": 2}\n', False),
    ],
)
def test_a_list_that_was_added_to_holds_what_it_was(
    tmp_path: Path, name: str, before: str, now: str, holds: bool
) -> None:
    """A longer list is known by its hash: it must be how this one begins."""
    path = tmp_path / name
    path.write_bytes(before.encode())
    spec = Space.from_texts(list_file=path, seeds="2").to_spec()
    path.write_bytes(now.encode())
    assert Space.from_texts(list_file=path, seeds="2").holds(spec) is holds
