"""What a recipe gives to the farm: its flags, its tasks, and what it makes of their results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple


class RecipeTask(NamedTuple):
    """``target`` is a key of ``Recipe.targets``; parameters are JSON values."""

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
        remarks: sentences to show before the start, after what they are about has been done.
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
