"""What a recipe makes of its results, called on the first few of them: a mistake is found early."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from muster.api.recipe import MapRecipe, Recipe
from muster.base.codec import check_storable
from muster.base.errors import MusterError, NotTried, TargetError, cause_of
from muster.run.folder import RunFolder

_FEW = 8
_HINT = (
    "what has been done is saved. Correct it and start the same command again, with "
    "--allow-changed-code where the tasks are in the same file."
)
_SURE = (NameError, AttributeError, ImportError, TypeError, NotImplementedError, SyntaxError)


class MissingColumn(KeyError):
    """A row was asked for a column that it does not have, and will not have at the end."""


class _Row(dict[str, Any]):
    def __missing__(self, name: str) -> Any:
        raise MissingColumn(name)


@dataclass
class Rehearsal:
    """What a recipe makes of its results, called once on the first few of them, leaving no trace.

    A mistake in it ends a sweep or a map after its first task instead of after its last. An error
    that may be due to having only a part of the results is merely noted.

    ``call`` is given the run folder; False: there is nothing to call it with yet.

    ``error``: a mistake that is sure to come again at the end.
    """

    call: Callable[[RunFolder], bool]
    say: Callable[[str], None]
    error: MusterError | None = None
    _due_at: int = 1

    def look(self, folder: RunFolder, num_done: int) -> bool:
        """Call it once, when the first results are there. True: the run is to end."""
        if not self._due_at or num_done < self._due_at:
            return False
        try:
            self._due_at = 0 if self.call(folder) else 2 * num_done
        except NotTried as reason:
            self._due_at = 0
            self.say(f"note       {reason}; it is called on all results at the end")
        except TargetError as error:
            self._due_at = 0
            self.error = error
            self.say(f"{str(error).splitlines()[0]} The run ends when the work in hand is done.")
        return self.error is not None


def rehearse_sweep(recipe: Recipe, config: Any, folder: RunFolder) -> bool:
    """``summarise`` and ``draw`` of the first tasks that are done."""
    from muster.farm.rows import done_rows

    rows = [
        _Row({**params, **metrics, **system})
        for params, metrics, system in itertools.islice(done_rows(folder), _FEW)
    ]
    if not rows:
        return False
    name = f"summarise of the recipe {recipe.name}"
    with _tried(name, recipe.summarise):
        table = recipe.summarise(config, iter(rows))
    if not isinstance(table, list) or not all(isinstance(row, dict) for row in table):
        raise _wrong(name, table, "a list of dicts, one for each row of the table")
    check_storable(name, table)
    _draw(recipe, lambda place: recipe.draw(config, table, place))
    return True


def rehearse_map(recipe: MapRecipe, config: Any, is_jsonl: bool, lines: Iterable[bytes]) -> bool:
    """``summarise`` and ``draw`` of the first records that are written, a line of JSON each."""
    # Another format gives every record every column.
    kind = _Row if is_jsonl else dict
    records = [kind(json.loads(line)) for line in itertools.islice(lines, _FEW)]
    if not records:
        return False
    if recipe.summarise is not None:
        name = f"summarise of the recipe {recipe.name}"
        with _tried(name, recipe.summarise):
            numbers = recipe.summarise(config, iter(records))
        if not isinstance(numbers, Mapping):
            raise _wrong(name, numbers, "a dict of numbers by name")
        check_storable(name, numbers)
    if (draw := recipe.draw) is not None:
        _draw(recipe, lambda place: draw(config, iter(records), place))
    return True


def _draw(recipe: Recipe | MapRecipe, draw: Callable[[Path], list[Path]]) -> None:
    assert recipe.draw is not None
    name = f"draw of the recipe {recipe.name}"
    with TemporaryDirectory(prefix="muster-rehearsal-") as place, _tried(name, recipe.draw):
        made = draw(Path(place))
        if not isinstance(made, list | tuple):
            raise _wrong(name, made, "a list of the paths that it has written")


@contextmanager
def _tried(name: str, hook: Callable[..., Any]) -> Iterator[None]:
    try:
        yield
    except TargetError:
        raise
    except Exception as error:
        if isinstance(error, ImportError) and (error.name or "").startswith("matplotlib"):
            return  # there will be a remark instead of figures
        cause = cause_of(error, hook)
        if not _is_sure(error):
            raise NotTried(f"{name} could not be rehearsed ({cause})") from None
        raise TargetError(
            f"{name} failed on the first results: {cause}.",
            hint=_HINT,
        ) from error


def _is_sure(error: Exception) -> bool:
    """Whether all results would meet the error too: it is not due to their number or to a None."""
    if isinstance(error, UnboundLocalError) or "NoneType" in str(error):
        return False
    return isinstance(error, (*_SURE, MissingColumn))


def _wrong(name: str, what: Any, wanted: str) -> TargetError:
    return TargetError(
        f"{name} gives {type(what).__name__}, not {wanted}.",
        hint=_HINT,
    )
