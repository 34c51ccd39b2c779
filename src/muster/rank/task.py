"""A user's task, of whatever kind: found by its name, made, its code checked, and rehearsed."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from muster.base.code import Code, changed_files, check_same_code, code_id, code_of
from muster.base.codec import MalformedError, decode
from muster.base.device_faults import is_out_of_memory
from muster.base.errors import MusterError, NotTried, TargetError, cause_of
from muster.base.modules import CLASS
from muster.base.target import load, parse_target
from muster.rank.process_group import Council, Gang
from muster.rank.seeding import Untouched
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
            f"{target} does not define {', '.join(missing)}.",
            hint=f"add the method{'s' * (len(missing) > 1)} to the class.",
        )
    better: Any = getattr(found, "better", None)
    if not hasattr(better, "__get__") and better not in ("lower", "higher"):  # not a property
        raise TargetError(
            f'{target} has better = {better!r}, which is neither "lower" nor "higher".',
            hint='write better = "lower" or better = "higher".',
        )
    return found


def make(kind: type[T], target: str, config: str | None, values: Mapping[str, Any]) -> T:
    """Make a task from its own settings.

    ``config``: the class of a recipe's settings, ``module:Class``, which is the only argument of
    its task. Without it the task is a dataclass, or takes nothing. Raises TargetError or UsageError
    for settings that do not fit.
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
        raise TargetError(f"The settings do not fit {target}: {error}.") from None
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


#: Errors whose cause may be the few samples or the untrained model: they may not come at the end.
_OPEN = (ValueError, ArithmeticError, IndexError, AssertionError)


@contextmanager
def tried(hook: Callable[..., Any], *, is_sure: bool = False) -> Iterator[None]:
    """Raise an exception of the method ``hook`` as TargetError with its name, file and line.

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


def check_gives(hook: Callable[..., Any], found: Any, kind: type) -> None:
    """TargetError where what the method ``hook`` has returned is not a ``kind``."""
    if not isinstance(found, kind):
        raise TargetError(
            f"{name_of(hook)} gave {type(found).__name__}, not {kind.__name__}.",
            hint="does it end with return?" if found is None else None,
        )


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
    """Raise on every rank where there is an error on any, so that none goes on alone."""
    messages = [each for each in council.gather(None if error is None else str(error)) if each]
    if error is not None:
        raise error
    if messages:
        raise TargetError(messages[0])
