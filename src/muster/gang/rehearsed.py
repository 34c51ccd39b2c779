"""Calling a user's code before it is needed: its mistakes told by name and line, no trace left."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from muster.base.errors import MusterError, TargetError
from muster.base.records import to_json
from muster.gang.agreement import Council
from muster.gang.memory import is_out_of_memory
from muster.gang.seeding import Untouched

#: May be the fault of the few samples or of the untrained model, and say nothing of the end.
_OPEN = (ValueError, ArithmeticError, IndexError, AssertionError)


class NotTried(Exception):
    """What failed in the rehearsal may well work at the end."""


@contextmanager
def tried(hook: Callable[..., Any], *, is_sure: bool = False) -> Iterator[None]:
    """An exception of ``hook``, a method, as TargetError with its name, file and line.

    Raises NotTried instead where few samples may be its only cause, unless ``is_sure``.
    """
    try:
        yield
    except MusterError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        sentence = f"{type(error).__name__}: {error} ({_place(hook, error)})"
        if isinstance(error, _OPEN) and not is_sure:
            raise NotTried(f"{name_of(hook)} could not be rehearsed ({sentence})") from None
        raise TargetError(
            f"{name_of(hook)} failed in the rehearsal before the first step: {sentence}.",
            hint="nothing has been trained yet; correct it and start the same command again.",
        ) from error


def name_of(hook: Callable[..., Any]) -> str:
    owner = getattr(hook, "__self__", None)
    return hook.__name__ if owner is None else f"{type(owner).__name__}.{hook.__name__}"


def _place(hook: Callable[..., Any], error: Exception) -> str:
    """The deepest line of the user's own file, or the deepest of all."""
    frames = traceback.extract_tb(error.__traceback__)
    code = getattr(hook, "__code__", None)
    own = [frame for frame in frames if code is not None and frame.filename == code.co_filename]
    frame = (own or list(frames))[-1]
    return f"{frame.filename}:{frame.lineno}"


def check_storable(hook: Callable[..., Any], what: Any) -> None:
    """TargetError for what could not be written to the results at the end."""
    try:
        to_json(what)
    except (TypeError, ValueError) as error:
        raise TargetError(
            f"{name_of(hook)} gives something that the results cannot hold: {error}.",
            hint="give numbers, texts, and lists or dicts of them (tensor.tolist(), for one).",
        ) from None


@contextmanager
def rehearsing(task: Any) -> Iterator[None]:
    """``task.rehearsing`` is True inside; its other attributes and the generators are put back."""
    before = dict(vars(task))
    object.__setattr__(task, "rehearsing", True)
    try:
        with Untouched():
            yield
    finally:
        vars(task).pop("rehearsing", None)
        vars(task).update(before)


def raise_together(council: Council, error: MusterError | None) -> None:
    """An error on every rank where there is one on any, so that none goes on alone."""
    messages = [each for each in council.gather(None if error is None else str(error)) if each]
    if error is not None:
        raise error
    if messages:
        raise TargetError(messages[0])
