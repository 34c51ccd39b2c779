"""Recipes by name or by file: muster's own, those of installed packages, a value in a file.

Packages offer theirs by entry points of the group ``muster.recipes``; which command a recipe
belongs to follows from what it is.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from muster.api.recipe import AgentRecipe, MapRecipe, Recipe, TrainRecipe
from muster.base.errors import TargetError, UnknownNameError, UsageError, nearest
from muster.base.modules import load_plugin, plugins
from muster.base.target import load_value, parse_target
from muster.run.folder import RunFolder

if TYPE_CHECKING:
    from muster.api.start.options import GangOptions, SweepOptions

#: What a target of one's own looks like; ``cpu:8`` and ``10:20`` do not.
TARGET = re.compile(r"[\w./\\-]+:[A-Za-z_][\w.]*")
#: For `muster sweep`.
RECIPES: dict[str, str] = {
    "ssm": "muster_recipes.ssm.recipe:RECIPE",
    "ssvae": "muster_recipes.ssvae.recipe:RECIPE",
}
#: For `muster train`.
TASKS: dict[str, str] = {
    "arith": "muster_recipes.arith.config:RECIPE",
    "digits": "muster_recipes.digits.config:RECIPE",
    "har": "muster_recipes.har.config:RECIPE",
    "ssvae": "muster_recipes.ssvae.config:RECIPE",
}
#: What learns by acting, for `muster train`.
AGENTS: dict[str, str] = {
    "clstm-ppo": "muster_recipes.clstm_ppo.config:AGENT",
    "ppo": "muster_recipes.ppo.config:AGENT",
}
#: For `muster map`.
MAPS: dict[str, str] = {
    "embed": "muster_recipes.embed.recipe:RECIPE",
    "reasoning": "muster_recipes.reasoning.recipe:RECIPE",
}
_COMMANDS: dict[type, tuple[str, dict[str, str]]] = {
    Recipe: ("sweep", RECIPES),
    TrainRecipe: ("train", TASKS),
    AgentRecipe: ("train", AGENTS),
    MapRecipe: ("map", MAPS),
}

_R = TypeVar("_R", Recipe, TrainRecipe, AgentRecipe, MapRecipe)


def sweep_recipe(word: str) -> Recipe | None:
    """The recipe for ``muster sweep`` that ``word`` names; None where it is something else.

    Raises UsageError where it names a recipe of another command.
    """
    return _find(word, Recipe)


def train_recipe(word: str) -> TrainRecipe | AgentRecipe | None:
    """As ``sweep_recipe``, for ``muster train``."""
    if word in AGENTS:
        return _find(word, AgentRecipe)
    found = _named(word)
    return found if isinstance(found, AgentRecipe) else _find(word, TrainRecipe)


def map_recipe(word: str) -> MapRecipe | None:
    """As ``sweep_recipe``, for ``muster map``."""
    return _find(word, MapRecipe)


def vet_new(config: Any, folder: RunFolder, options: SweepOptions | GangOptions) -> None:
    """UsageError for what a recipe refuses of a run that begins: an older one may have begun with
    it, and goes on. ``config``: its settings; None where there is no recipe.
    """
    if (check := getattr(config, "check_new", None)) is None:
        return
    has_begun = folder.exists() or folder.stage(0).parent.is_dir()  # the last stage's comes last
    if options.restart or not has_begun:
        check()


def is_recipe(word: str, kind: type) -> bool:
    """Whether ``word`` is the name of a recipe of this kind, or of an installed package's."""
    return word in _COMMANDS[kind][1] or (word[:1].isalpha() and word in plugins("recipe"))


def is_named(word: str, *kinds: type) -> bool:
    """Whether ``word`` is a recipe of one of these kinds, or ``file.py:NAME``."""
    is_own = TARGET.fullmatch(word) is not None and ".py:" in word
    return is_own or any(is_recipe(word, kind) for kind in kinds)


def unknown(what: str, word: str, *kinds: type) -> UsageError:
    """Of a word that names no recipe of these kinds here: on another machine it may."""
    from muster.cli.main import COMMANDS

    if word in COMMANDS:
        return UsageError(
            f"{word} is a command, and a line has one.", hint=f"begin with it: muster {word} …"
        )
    if shutil.which(word) is not None and not nearest(word, names_of(*kinds)):
        return UsageError(
            f"{word} is a program, and no {what}.",
            hint=f"`muster sweep … -- {word} …` runs it for every setting, and `muster run` a "
            "script of Python on many devices.",
        )
    return UnknownNameError(
        what, word, names_of(*kinds), "It may come from a package that is not installed here."
    )


def names_of(*kinds: type) -> list[str]:
    """Muster's own of these kinds, and those of installed packages, which are not loaded."""
    own = {name for kind in kinds for name in _COMMANDS[kind][1]}
    return sorted(own | plugins("recipe").keys())


def load_own(place: str) -> Any:
    module, _, attribute = place.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _find(word: str, kind: type[_R]) -> _R | None:
    command, own = _COMMANDS[kind]
    if word in own:
        found = load_own(own[word])
        assert isinstance(found, kind)
        return found
    found = _named(word)
    if found is None:
        for other, names in _COMMANDS.values():
            if word in names and other != command:
                raise _other_command(word, other, command)
        return None
    if isinstance(found, kind):
        return found
    for known, (other, _) in _COMMANDS.items():
        if isinstance(found, known):
            raise _other_command(word, other, command)
    return None


def _other_command(word: str, other: str, command: str) -> UsageError:
    return UsageError(
        f"{word} is a recipe of `muster {other}`, not of `muster {command}`.",
        hint=f"write: muster {other} {word}",
    )


def _named(word: str) -> Any:
    """What an installed package offers under ``word``, or the value that it names in a file."""
    if ":" in word:
        return _value(word)
    is_own = any(word in own for _, own in _COMMANDS.values())
    if is_own or not word[:1].isalpha() or word not in plugins("recipe"):
        return None
    found = load_plugin("recipe", word)
    if not isinstance(found, tuple(_COMMANDS)):
        package = plugins("recipe")[word].package
        raise TargetError(
            f"The recipe {word} of {package} is not a recipe but of type {type(found).__name__}.",
            hint="ask the authors of that package to correct it.",
        )
    return found


def _value(word: str) -> Any:
    """The value ``file.py:NAME`` or ``module:NAME``, where it is assigned at the top of a file:
    what is a function or class there may import torch, and is left to the workers."""
    try:
        ref = parse_target(word)
        path = ref.location
        if ref.kind != "file":
            spec = importlib.util.find_spec(ref.location)
            path = "" if spec is None or spec.origin is None else spec.origin
        tree = ast.parse(Path(path).read_text(encoding="utf-8"))
    except (TargetError, ImportError, OSError, SyntaxError, ValueError):
        return None  # told better by whoever reads the target next
    assigned = {
        target.id
        for statement in tree.body
        if isinstance(statement, ast.Assign | ast.AnnAssign)
        for target in (
            statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        )
        if isinstance(target, ast.Name)
    }
    return load_value(ref) if ref.attribute in assigned else None


def with_seeds_as_stored(config: Mapping[str, Any], words: list[str]) -> list[str]:
    """The words of an older run, in which ``--seeds 3`` was the one seed 3 of a recipe."""
    stored = list(config.get("seeds") or ())
    if len(stored) != 1:
        return words
    text = str(stored[0])
    for place in range(len(words) - 1):
        if words[place] == "--seeds" and words[place + 1] == text:
            return [*words[: place + 1], f"{text},", *words[place + 2 :]]
    return [f"{word}," if word == f"--seeds={text}" else word for word in words]
