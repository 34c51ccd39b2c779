"""Calling a user's code before it is needed: its mistakes told by name and line, no trace left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from muster.base.errors import MusterError, TargetError
from muster.base.trying import NotTried, cause_of
from muster.rank.agreement import Council
from muster.rank.memory import is_out_of_memory
from muster.rank.seeding import Untouched

#: May be the fault of the few samples or of the untrained model, and say nothing of the end.
_OPEN = (ValueError, ArithmeticError, IndexError, AssertionError)


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
        sentence = cause_of(error, hook)
        if isinstance(error, _OPEN) and not is_sure:
            raise NotTried(f"{name_of(hook)} could not be rehearsed ({sentence})") from None
        raise TargetError(
            f"{name_of(hook)} failed in the rehearsal before the first step: {sentence}.",
            hint="nothing has been trained yet; correct it and start the same command again.",
        ) from error


def name_of(hook: Callable[..., Any]) -> str:
    owner = getattr(hook, "__self__", None)
    return hook.__name__ if owner is None else f"{type(owner).__name__}.{hook.__name__}"


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
