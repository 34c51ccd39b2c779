"""From the name of a task to the task, whatever a task is."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from muster.base.code import Code, changed_files, check_same_code, code_id, code_of
from muster.base.codec import MalformedError, decode
from muster.base.errors import TargetError
from muster.base.target import CLASS, load, parse_target
from muster.rank.process_group import Gang
from muster.run.folder import RunFolder

T = TypeVar("T")


def find_class(target: str, base: type[T], hint: str) -> type[T]:
    """The class that ``file.py:Class`` or ``package.module:Class`` names.

    Raises TargetError when it is not a subclass of ``base`` or leaves out what that asks for.
    """
    found: Any = load(parse_target(target, kind=CLASS), kind=CLASS)
    if not isinstance(found, type) or not issubclass(found, base):
        raise TargetError(
            f"{target} is not a task: it does not derive from muster.{base.__name__}.", hint=hint
        )
    missing = sorted(getattr(found, "__abstractmethods__", ()))
    if missing:
        raise TargetError(
            f"{target} does not say its {', '.join(missing)}.",
            hint=f"add the method{'s' * (len(missing) > 1)} to the class.",
        )
    return found


def make(kind: type[T], target: str, config: str | None, values: Mapping[str, Any]) -> T:
    """A task with its own settings.

    ``config``: the class of a recipe's settings, ``module:Class``, which is the only argument of
    its task. Without it the task is a dataclass, or takes nothing.
    """
    plain: Any = kind
    try:
        if config is not None:
            module, _, name = config.partition(":")
            found = getattr(importlib.import_module(module), name)
            of_settings: T = plain(decode(found, values, ignore_unknown=True))
            return of_settings
        if dataclasses.is_dataclass(kind):
            return decode(kind, values, ignore_unknown=True)
    except MalformedError as error:
        raise TargetError(f"The settings of {target} do not fit: {error}.") from None
    try:
        of_values: T = plain(**values)
        return of_values
    except TypeError as error:
        raise TargetError(
            f"{target} cannot be made without arguments: {error}.",
            hint="make it a dataclass, so that its fields become flags, with a default each.",
        ) from None


def code_of_task(target: str) -> Code:
    """The source files of a task, as they are when a rank is about to import them."""
    return code_of([parse_target(target)])


def check_code(
    before: Code, now: Code, gang: Gang, folder: RunFolder, say: Callable[[str], None],
    *, allow_changed: bool,
) -> None:  # fmt: skip
    """PlanMismatchError on every rank where the checkpoint to go on from is of another code.

    The launcher looks at its start; here it is what the ranks import, also after a restart in the
    middle and on other nodes.
    """
    gang.council.check_same("the code of the task", code_id(now))
    if not allow_changed:
        check_same_code(before, now, folder.path)
    elif files := changed_files(before, now):
        say(f"note       going on with changed code: {', '.join(files)}")
