"""Which types the values of each column have, over all records.

Types are joined, not chosen by the first record: null gives way to anything, integers join with
floats, lists with lists and structs with structs. What cannot be joined is a ``Conflict``. A column
that was carried over from the input everywhere has the type it had there.
"""

from __future__ import annotations

import datetime
import decimal
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from muster.pipeline.sinks.parts import Batch, Part, batches
from muster.pipeline.sources.columnar import Again

#: Beyond this a float no longer holds every integer.
_EXACT_IN_FLOAT = 1 << 53
_MAX_INT64 = (1 << 63) - 1
#: A struct with more fields is a mapping with data for keys, and would make a column of each.
_MAX_FIELDS = 500
_MAX_DEPTH = 12
_NAMES = {
    bool: "bool", int: "integer", float: "float", str: "text", list: "list", dict: "struct",
    bytes: "bytes", datetime.datetime: "time with a date", datetime.date: "date",
    datetime.time: "time of day", datetime.timedelta: "duration", decimal.Decimal: "decimal",
}  # fmt: skip
#: What decimal256 holds.
_MAX_DIGITS = 76


@dataclass
class Seen:
    """What the values of one column (or the items of a list, or a field) have been so far.

    ``least`` and ``most`` are of the integers; ``length`` of the first list; ``item`` stands for
    the values in all lists, ``fields`` for those of all structs. ``zones``: of times, None for
    those without one; ``digits``: the most before and behind the point of a decimal.

    ``carried``: the fields of the Arrow data that hold the column; ``num_carried``: how many of
    its values are in them and not null; ``num_lists``: how many others are lists.
    """

    kinds: set[type] = field(default_factory=set)
    least: int = 0
    most: int = 0
    length: int | None = None
    item: Seen | None = None
    fields: dict[str, Seen] = field(default_factory=dict)
    zones: set[str | None] = field(default_factory=set)
    digits: tuple[int, int] = (1, 0)
    is_odd: bool = False
    carried: list[Any] = field(default_factory=list)
    num_carried: int = 0
    num_lists: int = 0

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
        if datetime.datetime in kinds:
            self.zones |= {_zone(v) for v in values if type(v) is datetime.datetime}
        if decimal.Decimal in kinds:
            self._add_decimals([v for v in values if type(v) is decimal.Decimal])

    def _add_decimals(self, values: list[decimal.Decimal]) -> None:
        self.is_odd = self.is_odd or not all(value.is_finite() for value in values)
        if not self.is_odd:
            before, behind = self.digits
            for value in values:
                _, digits, exponent = value.as_tuple()
                assert isinstance(exponent, int)
                behind = max(behind, -exponent)
                before = max(before, len(digits) + exponent)
            self.digits = before, behind

    def carry(self, field: Any, num_values: int) -> None:
        if field not in self.carried:
            self.carried.append(field)
        self.num_carried += num_values

    def _add_lists(self, lists: list[list[Any]]) -> None:
        self.num_lists += len(lists)
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
        if self.least < -_MAX_INT64 - 1 or self.most > _MAX_INT64:
            return "integers beyond 64 bits with a sign"
        if None in self.zones and len(self.zones) > 1:
            return "times with and without a time zone"
        if self.is_odd or sum(self.digits) > _MAX_DIGITS:
            return f"decimals that are not numbers or have more than {_MAX_DIGITS} digits"
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


class Survey:
    """The columns of the records of some parts, in the order in which they first appear.

    Whether the parts are whole shows when they are written.
    """

    def __init__(self, declared: Iterable[str] = (), again: Again | None = None) -> None:
        self.columns: dict[str, Seen] = {}
        self.num_rows = 0
        self._declared, self._again = frozenset(declared), again

    def add(self, part: Part) -> None:
        self.num_rows += part.num_rows
        for batch in batches([part], self._again, is_look=True):
            _note(batch, self.columns)

    def apart(self) -> set[str]:
        """Columns of Arrow data whose values count as any others: stages have changed them in some
        records, or they are declared, or the files disagree.
        """
        carried = {name: seen for name, seen in self.columns.items() if seen.carried}
        changed = {n for n, seen in carried.items() if seen.kinds or n in self._declared}
        return changed | {n for n, s in carried.items() if len(s.carried) > 1 and not _join(s)}


def survey(
    parts: Iterable[Part], declared: Iterable[str] = (), again: Again | None = None
) -> dict[str, Seen]:
    """The columns of all parts, which are read once more where that is needed for their types."""
    parts, found = list(parts), Survey(declared, again)
    for part in parts:
        found.add(part)
    columns = found.columns
    if apart := found.apart():
        from muster.pipeline.arrow import json_like

        for batch in batches(parts, again, is_look=True):
            if batch.carried is not None:
                for name in filter(batch.carried.has, apart):
                    columns[name].add(json_like(batch.carried.batch.column(name)))
        for name in apart:
            columns[name].carried = []
    return columns


def _join(seen: Seen) -> bool:
    """Make one field of those of all files, which may differ in nulls; whether that is possible."""
    import pyarrow as pa

    try:
        seen.carried = [pa.unify_schemas([pa.schema([f]) for f in seen.carried]).field(0)]
    except pa.ArrowException:
        return False
    return True


def _note(batch: Batch, found: dict[str, Seen]) -> None:
    if batch.carried is not None:
        for name in batch.carried.names:
            found.setdefault(name, Seen())
        for field, num_values in zip(batch.carried.fields, batch.carried.num_values, strict=True):
            found[field.name].carry(field, num_values)
    columns: dict[str, list[Any]] = {}
    for record in batch.records:
        for name, value in record.items():
            if name in columns:
                columns[name].append(value)
            else:
                columns[name] = [value]
    for name, values in columns.items():
        found.setdefault(name, Seen()).add(values)


def _zone(value: datetime.datetime) -> str | None:
    if value.tzinfo is None:
        return None
    return getattr(value.tzinfo, "key", None) or (
        value.isoformat()[-6:] if value.utcoffset() else "UTC"
    )
