"""What a recipe gives to the farm: its flags, its tasks, and what it makes of their results."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

from muster.base.errors import MusterError, TargetError, cause_of, nearest


class RecipeTask(NamedTuple):
    """One task of a recipe. ``target`` is a key of ``Recipe.targets``; parameters are JSON."""

    target: str
    params: Mapping[str, Any]
    priority: int = 0


def _nothing_to_say(config: Any) -> list[str]:
    return []


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A ready-made workload for ``muster sweep NAME``.

    Attributes
        name: what the user types.
        config: a frozen dataclass; its fields become the recipe's flags.
        targets: function name in a task → ``"package.module:function"``.
        plan: the tasks of a config, lazily and in the same order every time.
        count: how many tasks ``plan`` gives, without making them.
        summarise: rows of the exported table → rows of the recipe's own table.
        draw: those rows and a folder → the figures written there.
        forecast: sentences to show before the start, such as work that will not pay.
        extendable: fields that may change between two commands on one run folder, because they
            only add tasks.
    """

    name: str
    config: type
    targets: Mapping[str, str]
    plan: Callable[[Any], Iterator[RecipeTask]]
    count: Callable[[Any], int]
    summarise: Callable[[Any, Iterable[Mapping[str, Any]]], list[dict[str, Any]]]
    draw: Callable[[Any, list[dict[str, Any]], Path], list[Path]]
    extendable: frozenset[str] = frozenset()
    forecast: Callable[[Any], list[str]] = _nothing_to_say

    def __post_init__(self) -> None:
        tasks = (Iterable, "RecipeTasks, one by one")
        count = (Integral, "a number of tasks")
        _guard(self, plan=tasks, count=count, forecast=_SENTENCES)

    def planned(self, config: Any) -> Iterator[RecipeTask]:
        """The tasks of ``plan``, each checked; TargetError for a wrong one, or a wrong number."""
        total, number = self.count(config), 0
        name = f"plan of the recipe {self.name}"
        for task in _told_of(name, self.plan, self.plan(config)):
            self._check(name, task)
            number += 1
            if number > total:
                raise self._miscounted(total, "more")
            yield task
        if number < total:
            raise self._miscounted(total, str(number))

    def _check(self, name: str, task: Any) -> None:
        if not isinstance(task, RecipeTask):
            kind = type(task).__name__
            raise TargetError(f"{name} gives {kind}, not a RecipeTask.", hint=_TASK)
        word, params, _ = task
        if word not in self.targets:
            near = nearest(str(word), self.targets)
            meant = f"did you mean {near!r}? " if near else ""
            raise TargetError(
                f"{name} gives a task for {word!r}, which is none of its targets.",
                hint=f"{meant}Known: {', '.join(self.targets)}.",
            )
        if not isinstance(params, Mapping):
            kind = type(params).__name__
            raise TargetError(f"{name} gives parameters of type {kind}, not a dict.", hint=_TASK)

    def _miscounted(self, said: int, given: str) -> TargetError:
        return TargetError(
            f"count of the recipe {self.name} says {said}, and its plan gives {given}.",
            hint="both must agree for the same config, or nobody could tell when all is done.",
        )


@dataclass(frozen=True, kw_only=True)
class TrainRecipe:
    """What a recipe gives to ``muster train NAME``.

    Attributes
        name: what the user types.
        config: a frozen dataclass; its fields become flags. Its module imports no torch, so that
            a mistake on the command line is told at once.
        task: ``"package.module:Class"``, a ``Task`` that takes a config.
        defaults: fields of ``TrainConfig`` that suit it.
    """

    name: str
    config: type
    task: str
    defaults: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class AgentRecipe:
    """What a recipe that learns by acting gives to ``muster train NAME``.

    Attributes
        name: what the user types.
        config: a frozen dataclass; its fields become flags. Its module imports no torch, so that
            a mistake on the command line is told at once.
        task: ``"package.module:Class"``, an ``AgentTask`` that takes a config.
        defaults: fields of ``PpoConfig`` that suit it.
    """

    name: str
    config: type
    task: str
    defaults: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class MapRecipe:
    """What a recipe gives to ``muster map NAME``.

    Attributes
        name: what the user types.
        config: a frozen dataclass; its fields become flags. Its module imports nothing heavy.
        stages: the stages of a config, as dataclass instances, functions or classes.
        source: what to read where no ``--input`` is given: ``(text, config, split)`` of a path or
            a Hugging Face data set, or an iterable of records; None: an input must be given.
        inform: for a config that only asks something (``--list-datasets``) the answer as rows of
            a table (and as JSON); None: run.
        check: the columns of the input are looked at before anything starts.
        remarks: does what must be done before the start, and returns sentences to show about it.
        summarise: the records of the output, one by one, → numbers by name.
        draw: the records of the output and a folder → the figures written there.
        output: the default of ``--output``.
    """

    name: str
    config: type
    stages: Callable[[Any], list[Any]]
    source: Callable[[Any], Any]
    inform: Callable[[Any], list[dict[str, Any]] | None] = lambda config: None
    check: Callable[[Any, Iterable[str]], None] = lambda config, columns: None
    remarks: Callable[[Any], list[str]] = _nothing_to_say
    summarise: Callable[[Any, Iterable[Mapping[str, Any]]], dict[str, Any]] | None = None
    draw: Callable[[Any, Iterable[Mapping[str, Any]], Path], list[Path]] | None = None
    output: str = "output.jsonl"

    def __post_init__(self) -> None:
        _guard(
            self,
            stages=(Sequence, "a list of stages"),
            source=(object, ""),
            inform=((list, NoneType), "a list of rows, or None"),
            check=(object, ""),
            remarks=_SENTENCES,
        )


_SENTENCES = (Iterable, "a list of sentences")
_HINT = "correct it and start the same command again."
_TASK = 'write yield RecipeTask("a key of targets", {"parameter": value}).'


def _guard(recipe: Recipe | MapRecipe, **hooks: tuple[Any, str]) -> None:
    """Replace the user's hooks by guarded ones, so that no caller has to guard them."""
    for word, (kind, wanted) in hooks.items():
        name = f"{word} of the recipe {recipe.name}"
        object.__setattr__(recipe, word, _guarded(name, getattr(recipe, word), kind, wanted))


def _guarded(name: str, hook: Callable[..., Any], kind: Any, wanted: str) -> Callable[..., Any]:
    """``hook``, which raises TargetError with its name, file and line for whatever goes wrong."""

    @functools.wraps(hook)
    def call(*given: Any) -> Any:
        with _told(name, hook):
            found = hook(*given)
        if not isinstance(found, kind):
            raise TargetError(f"{name} gives {type(found).__name__}, not {wanted}.", hint=_HINT)
        return found

    return call


def _told_of(name: str, hook: Callable[..., Any], made: Iterable[Any]) -> Iterator[Any]:
    with _told(name, hook):
        yield from made


@contextmanager
def _told(name: str, hook: Callable[..., Any]) -> Iterator[None]:
    try:
        yield
    except MusterError:
        raise
    except Exception as error:
        raise TargetError(f"{name} failed: {cause_of(error, hook)}.", hint=_HINT) from error
