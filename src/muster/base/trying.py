"""Calling a user's code before it is needed: its mistakes told by name, file and line."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from typing import Any

from muster.base.codec import to_json
from muster.base.errors import TargetError


class NotTried(Exception):
    """What failed in the rehearsal may well work at the end."""


def cause_of(error: Exception, hook: Callable[..., Any]) -> str:
    """``error`` with the deepest line of the hook's own file, or the deepest of all.

    Where the hook itself was not reached, or is done, the line is that of its definition.
    """
    frames = traceback.extract_tb(error.__traceback__)
    code = getattr(inspect.unwrap(hook), "__code__", None)
    own = [frame for frame in frames if code is not None and frame.filename == code.co_filename]
    if own or code is None:
        frame = (own or list(frames))[-1]
        place = f"{frame.filename}:{frame.lineno}"
    else:
        place = f"{code.co_filename}:{code.co_firstlineno}"
    return f"{type(error).__name__}: {error} ({place})"


def check_storable(name: str, what: Any) -> None:
    """TargetError for what the hook ``name`` gives and the results could not hold."""
    try:
        to_json(what)
    except (TypeError, ValueError) as error:
        raise TargetError(
            f"{name} gives something that the results cannot hold: {error}.",
            hint="give numbers, texts, and lists or dicts of them (tensor.tolist(), for one).",
        ) from None
