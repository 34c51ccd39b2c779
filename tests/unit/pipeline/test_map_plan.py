"""From a stage in Python or by name to the same stage in another process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import MusterCli

from muster.api.runs import Run
from muster.base.errors import TargetError, UsageError
from muster.base.flags import parse_memory_mib
from muster.pipeline.stages import make_stage, spec_of_object, specs_of_text
from muster.pipeline.worker import MapPlan, first_batch, read_plan, write_plan


@dataclass(frozen=True, kw_only=True)
class Inner:
    stop: tuple[str, ...] = ()
    size: float = 1.0


@dataclass
class Outer:
    inner: Inner = field(default_factory=Inner)
    place: Path = Path("a")
    batch_size: int = 7

    def process(self, batch: list[Any]) -> list[Any]:
        return batch


class Bare:
    def process(self, batch: list[Any]) -> list[Any]:
        return batch


class Demanding(Bare):
    def __init__(self, model: str) -> None:
        self.model = model


class NoStage:
    pass


def double(record: dict[str, Any]) -> dict[str, Any]:
    return record


def test_a_dataclass_survives_the_way_through_json_with_all_it_holds(tmp_path: Path) -> None:
    stage = Outer(inner=Inner(stop=("a", "b"), size=2.5), place=Path("x/y"))
    plan = MapPlan(source={}, stages=(spec_of_object(stage),), base_folder=str(tmp_path))
    write_plan(tmp_path / "map.json", plan)
    again = read_plan(tmp_path / "map.json")
    # This file is loaded as another module there, so the classes are not the same object.
    assert repr(make_stage(again.stages[0], Path.cwd())) == repr(stage)


def test_functions_and_classes_are_themselves() -> None:
    assert make_stage(spec_of_object(double), Path.cwd()).__qualname__ == "double"
    assert type(make_stage(spec_of_object(Bare), Path.cwd())).__qualname__ == "Bare"


@pytest.mark.parametrize(
    ("stage", "text"),
    [
        (NoStage, "neither process nor process_one"),
        (Bare(), "workers are other processes"),
        (lambda record: record, "lambda"),
    ],
)
def test_what_cannot_be_a_stage_is_told(stage: Any, text: str) -> None:
    with pytest.raises(TargetError, match=text):
        spec_of_object(stage)


def test_a_class_that_wants_arguments_is_told_in_time() -> None:
    with pytest.raises(TargetError, match="make it a dataclass"):
        make_stage(spec_of_object(Demanding), Path.cwd())


def test_a_list_of_stages_is_one_spec_each(tmp_path: Path) -> None:
    (tmp_path / "many.py").write_text(
        "def one(r):\n    return r\n\nclass Two:\n    def process(self, b):\n        return b\n\n"
        "STEPS = [one, Two]\nWRONG = [one, 3]\n"
    )
    specs = specs_of_text("many.py:STEPS", {}, tmp_path)
    made = [make_stage(spec, tmp_path) for spec in specs]
    assert made[0].__name__ == "one"
    assert type(made[1]).__name__ == "Two"
    assert [spec.name for spec in specs] == ["STEPS[0]", "STEPS[1]"]
    with pytest.raises(TargetError, match="is not a stage"):
        specs_of_text("many.py:WRONG", {}, tmp_path)


def test_the_batch_is_what_the_stages_ask_for_unless_it_is_said() -> None:
    assert first_batch([Outer(), Bare()], 0) == 7
    assert first_batch([Bare()], 0) == 32
    assert first_batch([double], 0) == 256
    assert first_batch([Outer(), double], 5) == 5


@pytest.mark.parametrize(
    ("text", "mib"), [("900M", 900), ("2G", 2048), ("1.5GiB", 1536), ("1048576", 1), ("512k", 0.5)]
)
def test_memory_is_read_as_people_write_it(text: str, mib: float) -> None:
    assert parse_memory_mib(text, "--max-worker-memory") == mib


def test_memory_that_makes_no_sense_is_told() -> None:
    with pytest.raises(UsageError, match="8G"):
        parse_memory_mib("a lot", "--max-worker-memory")


@pytest.mark.parametrize(
    ("says", "code", "told"),
    [("pass", 1, "2 rejected"), ("concurrency = 2.0", 1, "2 rejected"),
     ("concurrency = 'many'", 1, "is 'many', not a number"), ("concurrency = 0", 1, "is 0, not a")],
)  # fmt: skip
def test_a_waiting_stage_without_or_with_a_wrong_concurrency_is_not_tried_twenty_times(
    says: str, code: int, told: str, tmp_path: Path, muster_main: MusterCli
) -> None:
    (tmp_path / "s.py").write_text(
        f"class One:\n    {says}\n    async def process_one(self, record):\n        return 1 / 0\n"
    )
    (tmp_path / "in.jsonl").write_text('{"a": 1}\n{"a": 2}\n')
    line = "map s.py:One --input in.jsonl --output o.jsonl --on inline --devices cpu:1 --run-dir r"
    done = muster_main(*line.split())
    assert done.returncode == code and told in done.stdout + done.stderr, done.stdout + done.stderr
    assert Run(tmp_path / "r").status().num_retried == 0


def with_one_more(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def inner(record: dict[str, Any]) -> Any:
        return function(record, 2)

    return inner


@with_one_more
def given_more(record: dict[str, Any], factor: int) -> dict[str, Any]:
    return {"n": record["n"] * factor}


def takes_two(record: dict[str, Any], factor: int, *more: int, **named: int) -> dict[str, Any]:
    return record


def test_a_decorator_may_give_a_stage_more_than_its_record() -> None:
    assert make_stage(spec_of_object(given_more), Path.cwd())({"n": 3}) == {"n": 6}


def test_what_a_stage_needs_beside_its_record_is_named() -> None:
    with pytest.raises(TargetError, match="it needs record and factor, and a stage"):
        spec_of_object(takes_two)
