"""The space of a sweep: which parameter sets there are, in which order, without listing them.

A space is list rows x zip rows x the product of the grid x seeds. Seeds are the outermost loop:
every setting gets its first seed before any gets its second, so that a sweep stopped half-way has
looked at all settings. Inside one seed the list is the slowest and the last grid name the fastest.

Memory holds the values, not the tasks: a grid of a million tasks is a few short lists. Rows of a
list file are held whole, equal cells once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from muster.base.errors import UsageError, check_parameter_name
from muster.farm.canonical import encode_canonical, unwrap_scalar
from muster.farm.space_texts import (
    MISSING,
    ListRows,
    as_columns,
    check_distinct,
    check_joined,
    checked_seeds,
    content_of,
    parse_grid,
    parse_seeds,
    read_list,
    show_value,
)

#: One parameter and the values it takes.
Axis = tuple[str, tuple[object, ...]]

SEED = "seed"

#: A specification is for people and for comparing; longer lists are shown by their hash.
_MAX_SHOWN = 200

#: Fewer values in a row are encoded with all others; of more the encoded ones are not kept.
_MIN_ALONG, _MAX_HELD = 4, 20_000


@dataclass(frozen=True)
class Space:
    """Parameter sets, iterated lazily. Make one with `from_texts` or `from_values`, which check it.

    ``zipped`` names advance together. ``seeds`` None means that no task has a ``seed``. A space
    with nothing in it is one task without parameters.
    """

    grid: tuple[Axis, ...] = ()
    zipped: tuple[Axis, ...] = ()
    listed: ListRows | None = None
    seeds: range | tuple[int, ...] | None = None

    @classmethod
    def from_texts(
        cls,
        *,
        grid: Iterable[str] = (),
        zipped: Iterable[str] = (),
        list_file: Path | None = None,
        seeds: str | None = None,
        seed_offset: int = 0,
        priority_column: str = "",
    ) -> Space:
        """The space that command-line texts describe; values without JSON or quotes are `Text`."""
        return _checked(
            cls(
                grid=_axes("grid", grid),
                zipped=_axes("zip", zipped),
                listed=_ranked(
                    None if list_file is None else read_list(list_file, priority_column),
                    priority_column,
                ),
                seeds=None if seeds is None else parse_seeds(seeds, seed_offset),
            )
        )

    @classmethod
    def from_values(
        cls,
        *,
        grid: Mapping[str, Iterable[object]] | None = None,
        zipped: Mapping[str, Iterable[object]] | None = None,
        rows: Iterable[Mapping[str, object]] | None = None,
        seeds: int | Iterable[int] | None = None,
        seed_offset: int = 0,
        priority_column: str = "",
    ) -> Space:
        """The space of Python values, which keep their types; numpy scalars become Python ones.

        ``priority_column`` of ``rows`` says how urgent each is. ``seeds`` is a count or the seeds
        themselves, each shifted by ``seed_offset``.
        """
        return _checked(
            cls(
                grid=_python_axes("grid", grid or {}),
                zipped=_python_axes("zip", zipped or {}),
                listed=_ranked(None if rows is None else _python_rows(rows), priority_column),
                seeds=None if seeds is None else _python_seeds(seeds, seed_offset),
            )
        )

    @property
    def names(self) -> tuple[str, ...]:
        """The parameter names in the order of the task dicts; ``seed`` last if there are seeds."""
        listed = self.listed.names if self.listed else ()
        axes = tuple(name for name, _ in (*self.zipped, *self.grid))
        return listed + axes + ((SEED,) if self.seeds is not None else ())

    def __len__(self) -> int:
        count = 1 if self.listed is None else len(self.listed.rows)
        if self.zipped:
            count *= len(self.zipped[0][1])
        for _, values in self.grid:
            count *= len(values)
        return count if self.seeds is None else count * len(self.seeds)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if self.seeds is None:
            yield from self._settings()
            return
        for seed in self.seeds:
            for params in self._settings():
                params[SEED] = seed
                yield params

    def payloads(self) -> Iterator[bytes]:
        """`encode_canonical` of each task. Along the fastest name one value changes, and it alone
        is encoded again.
        """
        name: str
        values: Sequence[object]
        if self.grid:
            name, values = self.grid[-1]
            others = replace(self, grid=self.grid[:-1])
        else:
            name, values = SEED, self.seeds or ()
            others = Space() if not (self.zipped or self.listed) else self
        if len(values) < _MIN_ALONG or others is self:
            yield from map(encode_canonical, self)
            return
        held = [_entry(name, value) for value in values] if len(values) <= _MAX_HELD else None
        for params in others:
            before = encode_canonical({key: params[key] for key in params if key < name})[:-1]
            after = encode_canonical({key: params[key] for key in params if key > name})[1:]
            before += b"," * (len(before) > 1)
            after = b"," * (len(after) > 1) + after
            for entry in held or (_entry(name, value) for value in values):
                yield before + entry + after

    def priorities(self) -> Iterator[int]:
        """How urgent each parameter set is, in their order and again and again."""
        if self.listed is None or self.listed.priorities is None:
            return itertools.repeat(0)
        num_seeds = 1 if self.seeds is None else len(self.seeds)
        num_each = len(self) // (num_seeds * len(self.listed.rows))
        again_and_again = itertools.cycle(self.listed.priorities)
        return itertools.chain.from_iterable(
            itertools.repeat(one, num_each) for one in again_and_again
        )

    def _settings(self) -> Iterator[dict[str, Any]]:
        names = tuple(name for name, _ in self.grid)
        pools = [values for _, values in self.grid]
        for outer in self._outer():
            if not names:
                yield outer
            elif outer:
                for combination in itertools.product(*pools):
                    yield {**outer, **dict(zip(names, combination, strict=False))}
            else:
                for combination in itertools.product(*pools):
                    yield dict(zip(names, combination, strict=False))

    def _outer(self) -> Iterator[dict[str, Any]]:
        names = tuple(name for name, _ in self.zipped)
        together = list(zip(*(values for _, values in self.zipped), strict=True)) or [()]
        if self.listed is None:
            for values in together:
                yield dict(zip(names, values, strict=True))
            return
        names = self.listed.names + names
        for row in self.listed.rows:
            for values in together:
                yield {
                    name: value
                    for name, value in zip(names, row + values, strict=True)
                    if value is not MISSING
                }

    def holds(self, spec: Mapping[str, Any]) -> bool:
        """Whether all settings of an earlier space are among these, by what `to_spec` said of it;
        False where that does not tell, as for another list file. Seeds are no part of a setting.
        """
        grid, zipped = spec.get("grid", {}), spec.get("zip", {})
        own = self.to_spec()
        axes = own.get("grid", {}).keys(), own.get("zip", {}).keys()
        if (grid.keys(), zipped.keys()) != axes or not _continues(self.listed, spec.get("list")):
            return False
        if zipped != own.get("zip", {}):
            columns = [
                (zipped[name], [show_value(v) for v in values]) for name, values in self.zipped
            ]
            if not all(isinstance(old, list) for old, _ in columns):
                return False
            before, now = (set(zip(*part, strict=True)) for part in zip(*columns, strict=True))
            if not before <= now:
                return False
        return all(_holds(values, grid[name]) for name, values in self.grid)

    def to_spec(self) -> dict[str, Any]:
        """A small JSON description for ``run.json``: enough to say what differs, not to rebuild."""
        spec: dict[str, Any] = {}
        if self.grid:
            spec["grid"] = {name: _shown_values(values) for name, values in self.grid}
        if self.zipped:
            spec["zip"] = {name: _shown_values(values) for name, values in self.zipped}
        if self.listed:
            spec["list"] = {
                "source": self.listed.source,
                "rows": len(self.listed.rows),
                "names": list(self.listed.names),
                "sha256": self.listed.content_hash,
            }
        if self.seeds is not None:
            spec["seeds"] = _shown_seeds(self.seeds)
        return spec


def _entry(name: str, value: object) -> bytes:
    """What stands for it in the canonical encoding of a task."""
    return encode_canonical({name: value})[1:-1]


def _continues(listed: ListRows | None, before: Mapping[str, Any] | None) -> bool:
    """Whether the rows begin with those of an earlier list, of which the hash is known."""
    if listed is None or before is None:
        return listed is None and before is None
    if before["sha256"] == listed.content_hash:
        return True
    if before["names"] != list(listed.names):
        return False
    content = b""
    with suppress(OSError):
        content = listed.content()
    if sha256(content).hexdigest() != listed.content_hash:
        return False  # the file is gone, or another one since it was read
    state = sha256()
    for line in content.split(b"\n"):
        for part in (line, b"\n"):  # the last line may have had no end then
            state.update(part)
            if state.hexdigest() == before["sha256"]:
                return True
    return False


def _holds(values: tuple[object, ...], shown: Any) -> bool:
    """Whether all values that `_shown_values` describes are among ``values``."""
    if isinstance(shown, list):
        return set(shown) <= {show_value(value) for value in values}
    # A longer axis is known by its hash alone: it must be a stretch of this one.
    count = shown["count"]
    return any(
        show_value(value) == shown["first"] and _shown_values(values[at : at + count]) == shown
        for at, value in enumerate(values[: len(values) - count + 1])
    )


def check_space_distinct(space: Space, shown: Space) -> None:
    """`check_distinct` for each part of ``space``; ``shown`` is the same space as written."""
    for (name, values), (_, written) in zip(space.grid, shown.grid, strict=True):
        check_distinct(f"grid {name}", values, written)
    if space.zipped:
        names = ", ".join(name for name, _ in space.zipped)
        together = [list(zip(*(v for _, v in s.zipped), strict=True)) for s in (space, shown)]
        check_distinct(f"zip {names}", together[0], together[1])
    if space.listed and shown.listed:
        check_distinct(f"list {space.listed.source}", space.listed.rows, shown.listed.rows)


def _checked(space: Space) -> Space:
    """``space`` itself, or an error when names clash, lengths differ or values repeat."""
    origin: dict[str, str] = {}
    groups = [
        ("list", space.listed.names if space.listed else ()),
        ("zip", [name for name, _ in space.zipped]),
        ("grid", [name for name, _ in space.grid]),
        ("seeds", [SEED] if space.seeds is not None else []),
    ]
    for group, names in groups:
        for name in names:
            if name in origin:
                both = " and ".join(dict.fromkeys((origin[name], group)))
                raise UsageError(
                    f"Parameter {name} is given twice, in {both}.",
                    hint="a parameter gets its values in one place; put all of them there.",
                )
            origin[name] = group
    lengths = {name: len(values) for name, values in space.zipped}
    if len(set(lengths.values())) > 1:
        listing = ", ".join(f"{name} has {count}" for name, count in lengths.items())
        raise UsageError(
            f"zip needs the same number of values for each name: {listing}.",
            hint="zip pairs the first values, then the second; use grid for all combinations.",
        )
    check_space_distinct(space, space)
    return space


def _axes(group: str, texts: Iterable[str]) -> tuple[Axis, ...]:
    listed = tuple(texts)
    check_joined(group, listed)
    return tuple((name, tuple(values)) for name, values in map(parse_grid, listed))


def _python_axes(group: str, axes: Mapping[str, Iterable[object]]) -> tuple[Axis, ...]:
    result: list[Axis] = []
    for name, values in axes.items():
        check_parameter_name(name)
        if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
            raise UsageError(
                f"{group} {name} is {values!r}, not a list of values.", hint=f"write [{values!r}]."
            )
        listed = tuple(unwrap_scalar(value) for value in values)
        if not listed:
            raise UsageError(f"{group} {name} has no values.", hint="give at least one value.")
        result.append((name, listed))
    return tuple(result)


def _ranked(listed: ListRows | None, column: str) -> ListRows | None:
    if not column:
        return listed
    if listed is None:
        raise UsageError(
            "--priority-column has no effect without --list.",
            hint="it names a column of a list; muster add has --priority for all that it adds.",
        )
    return listed.with_priorities(column)


def _python_rows(rows: Iterable[Mapping[str, object]]) -> ListRows:
    names, cells = as_columns(list(rows))
    if not cells:
        raise UsageError("rows is empty.", hint="give one row for each setting.")
    for name in names:
        check_parameter_name(name)
    plain = tuple(tuple(unwrap_scalar(cell) for cell in row) for row in cells)

    def content() -> bytes:
        return b"\n".join((content_of(names), *(content_of(row) for row in plain)))

    return ListRows("rows", names, plain, sha256(content()).hexdigest(), content)


def _python_seeds(seeds: int | Iterable[int], offset: int) -> range | tuple[int, ...]:
    shown = f"{seeds!r}"
    if isinstance(seeds, int):
        return checked_seeds(range(offset, offset + seeds), shown, offset)
    if isinstance(seeds, range):
        moved = range(seeds.start + offset, seeds.stop + offset, seeds.step)
        return checked_seeds(moved, shown, offset)
    plain = [unwrap_scalar(seed) for seed in seeds]
    for seed in plain:
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise UsageError(f"The seed {seed!r} is not an integer.", hint="seeds=[0, 1, 2]")
    return checked_seeds(tuple(int(str(seed)) + offset for seed in plain), shown, offset)


def _shown_values(values: tuple[object, ...]) -> Any:
    if len(values) <= _MAX_SHOWN:
        return [show_value(value) for value in values]
    digest = sha256(b"\n".join(content_of(value) for value in values)).hexdigest()
    return {
        "count": len(values),
        "first": show_value(values[0]),
        "last": show_value(values[-1]),
        "sha256": digest,
    }


def _shown_seeds(seeds: range | tuple[int, ...]) -> str:
    if isinstance(seeds, range) and seeds.step == 1:
        return f"{seeds.start}:{seeds.stop}"
    if len(seeds) <= _MAX_SHOWN:
        return ",".join(map(str, seeds))
    digest = sha256(",".join(map(str, seeds)).encode()).hexdigest()[:12]
    return f"{len(seeds)} seeds, {seeds[0]} to {seeds[-1]} (sha256 {digest})"
