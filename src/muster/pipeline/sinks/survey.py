"""Which types the values of each column have, over all records; no library for columns needed.

Types are joined, not chosen by the first record: null gives way to anything, integers join with
floats, lists with lists and structs with structs. What cannot be joined is a ``Conflict``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from muster.pipeline.sinks.model import Part
from muster.pipeline.sinks.parts import batches

#: Beyond, a float no longer holds every integer.
_EXACT_IN_FLOAT = 1 << 53
_MAX_INT64 = (1 << 63) - 1
#: A struct with more fields is a mapping with data for keys, and would make a column of each.
_MAX_FIELDS = 500
_MAX_DEPTH = 12
_NAMES = {bool: "bool", int: "integer", float: "float", str: "text", list: "list", dict: "struct"}


@dataclass
class Seen:
    """What the values of one column (or the items of a list, or a field) have been so far.

    ``least`` and ``most`` are of the integers; ``length`` of the first list; ``item`` stands for
    the values in all lists, ``fields`` for those of all structs.
    """

    kinds: set[type] = field(default_factory=set)
    least: int = 0
    most: int = 0
    length: int | None = None
    item: Seen | None = None
    fields: dict[str, Seen] = field(default_factory=dict)

    def add(self, values: Iterable[Any]) -> None:
        """Take note of some values; the loops over single values are left to C where they can."""
        values = list(values)
        kinds = set(map(type, values))
        kinds.discard(type(None))
        self.kinds |= kinds
        if int in kinds:
            whole = values if len(kinds) == 1 else [v for v in values if type(v) is int]
            whole = [v for v in whole if v is not None]
            self.least = min(self.least, *whole) if len(whole) > 1 else min(self.least, whole[0])
            self.most = max(self.most, *whole) if len(whole) > 1 else max(self.most, whole[0])
        if list in kinds:
            self._add_lists([v for v in values if type(v) is list])
        if dict in kinds:
            self._add_structs([v for v in values if type(v) is dict])

    def _add_lists(self, lists: list[list[Any]]) -> None:
        if self.length is None:
            self.length = len(lists[0])
        if self.item is None:
            self.item = Seen()
        self.item.add([value for items in lists for value in items])

    def _add_structs(self, structs: list[dict[str, Any]]) -> None:
        by_name: dict[str, list[Any]] = {}
        for struct in structs:
            for name, value in struct.items():
                by_name.setdefault(name, []).append(value)
        for name, values in by_name.items():
            if name not in self.fields:
                if len(self.fields) > _MAX_FIELDS:
                    return
                self.fields[name] = Seen()
            self.fields[name].add(values)

    def conflict(self, depth: int = 0) -> str | None:
        """Why no one type holds all of these values, in words; None when one does."""
        names = sorted(_NAMES[kind] for kind in self.kinds)
        if len(names) > 1 and names != ["float", "integer"]:
            return " and ".join(names)
        is_far = self.least < -_EXACT_IN_FLOAT or self.most > _EXACT_IN_FLOAT
        if len(names) > 1 and is_far:
            return "floats, and integers too large for a float"
        if self.most > _MAX_INT64:
            return "integers beyond 64 bits with a sign"
        if depth == _MAX_DEPTH:
            return f"values nested more than {_MAX_DEPTH} deep"
        if self.item is not None:
            inner = self.item.conflict(depth + 1)
            return None if inner is None else f"lists of {inner}"
        if dict in self.kinds and not self.fields:
            return "structs without any field"
        if len(self.fields) > _MAX_FIELDS:
            return f"structs with more than {_MAX_FIELDS} different fields"
        for name, seen in self.fields.items():
            inner = seen.conflict(depth + 1)
            if inner is not None:
                return f"structs whose field {name!r} has {inner}"
        return None


def survey(parts: Iterable[Part]) -> dict[str, Seen]:
    """The columns of all records, in the order in which they first appear."""
    found: dict[str, Seen] = {}
    for batch in batches(parts):
        _note(batch.records, found)
    return found


def _note(rows: list[dict[str, Any]], found: dict[str, Seen]) -> None:
    columns: dict[str, list[Any]] = {}
    for record in rows:
        for name, value in record.items():
            if name in columns:
                columns[name].append(value)
            else:
                columns[name] = [value]
    for name, values in columns.items():
        found.setdefault(name, Seen()).add(values)
