"""What a rank writes down of an exception that does not behave, or is followed by another."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from muster.gang.account import give_account
from muster.run.folder import RunFolder


@dataclass(frozen=True)
class Frozen(Exception):
    step: int


class Strict(Exception):
    def __setattr__(self, name: str, value: Any) -> None:
        raise TypeError("it has no attributes")


class Textless(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


@contextmanager
def passing_on() -> Iterator[None]:
    yield


def raised(call: Callable[[], None]) -> BaseException:
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("it has to raise")


def in_context() -> None:
    with passing_on():
        raise Frozen(3)


def by_itself(error: Exception) -> Callable[[], None]:
    def call() -> None:
        raise error

    return call


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (by_itself(Frozen(3)), "Frozen"),
        (in_context, "Frozen"),
        (by_itself(Strict()), "Strict"),
        (by_itself(Textless()), "Textless"),
        (by_itself(ValueError("plain")), "ValueError"),
    ],
    ids=["frozen", "frozen in a context manager", "strict", "without text", "plain"],
)
def test_any_error_is_told_once_and_by_its_own_name(
    call: Callable[[], None], name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(tmp_path)
    folder.rank_error(1).parent.mkdir(parents=True, exist_ok=True)
    error = raised(call)
    give_account(error, folder, 1)
    give_account(error, folder, 1)
    assert json.loads(folder.rank_error(1).read_text())["type"] == name
    assert capfd.readouterr().err.count("Traceback (most recent call last)") == 1


def test_what_an_error_has_led_to_does_not_take_its_place(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.rank_error(0).parent.mkdir(parents=True, exist_ok=True)

    def parts() -> None:
        try:
            raise ValueError("the cause")
        except ValueError as error:
            give_account(error, folder, 0)
            raise RuntimeError("Connection closed by peer") from error

    give_account(raised(parts), folder, 0)
    assert json.loads(folder.rank_error(0).read_text())["message"] == "the cause"
