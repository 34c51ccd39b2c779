"""Values of a space as a user types them: their marks and names, when two are the same, and reading
them from ``name=values``, seeds, and list files.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b, sha256
from pathlib import Path
from typing import Final

from muster.base.errors import TargetError, UsageError, check_parameter_name
from muster.base.shown_text import shell_word
from muster.farm.canonical import encode_canonical


class Text(str):
    """A value as typed on the command line or in a CSV cell: its type is not known yet.

    A plain ``str`` is a string on purpose; only a Text may still turn into a number.
    """

    __slots__ = ()


class _Missing:
    def __repr__(self) -> str:
        return "(left out)"


#: The cell of a JSONL row that leaves the name out: the function's default applies.
MISSING: Final = _Missing()


def check_distinct(
    where: str, values: Sequence[object], shown: Sequence[object] | None = None
) -> None:
    """UsageError when two ``values`` are the same: their tasks would be the same task.

    ``shown`` are the values as the user wrote them, before they got their types.
    """
    shown = values if shown is None else shown
    # Digests, because encoded bytes of a million rows would keep a kilobyte each: they are cut
    # from larger buffers that stay allocated with them.
    seen: set[bytes] = set()
    for index, value in enumerate(values):
        digest = blake2b(content_of(value), digest_size=16).digest()
        if digest in seen:
            first = _first_equal(values, value)
            one, two = show_value(shown[first]), show_value(shown[index])
            what = f"{one} twice" if one == two else f"{one} and {two}, which are the same value"
            raise UsageError(
                f"{where} holds {what}: the tasks would be identical and run once.",
                hint="remove one of them; to repeat a setting use --seeds.",
            )
        seen.add(digest)


def show_value(value: object) -> str:
    """A value as a person would type it."""
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, tuple):
        return ", ".join(show_value(item) for item in value)
    if value is None or isinstance(value, bool | list | dict):
        return json.dumps(value, default=repr)
    return str(value)


def content_of(value: object) -> bytes:
    if isinstance(value, tuple) and MISSING in value:
        return b"-".join(b"" if item is MISSING else content_of(item) for item in value)
    try:
        return encode_canonical(value)
    except TargetError:
        # A Path or the like from Python: it gets its stored form when the target is known.
        return repr(value).encode()


def _first_equal(values: Sequence[object], value: object) -> int:
    content = content_of(value)
    return next(i for i, other in enumerate(values) if content_of(other) == content)


_QUOTES = "'\""


@dataclass(frozen=True)
class ListRows:
    """The rows of ``--list``: ``rows[i][j]`` is the value of ``names[j]``, or MISSING.

    ``priorities``: one for each row; None where all are alike.
    """

    source: str
    names: tuple[str, ...]
    rows: tuple[tuple[object, ...], ...]
    content_hash: str
    #: What was hashed; a file is read once more, for it is not kept.
    content: Callable[[], bytes] = field(compare=False, repr=False)
    priorities: tuple[int, ...] | None = None

    def with_priorities(self, column: str) -> ListRows:
        """The same without this column, which says how urgent a row is: most urgent rows first.

        A row that leaves it out or empty has 0. Raises UsageError for what is no priority.
        """
        if column not in self.names:
            raise UsageError(
                f"{self.source} has no column {column}, which --priority-column names; it has "
                f"{', '.join(self.names)}.",
                hint="name one of these, or leave --priority-column out.",
            )
        if len(self.names) == 1:
            raise UsageError(
                f"{self.source} has no parameters: its only column, {column}, has the priorities.",
                hint="add a column for each parameter.",
            )
        at = self.names.index(column)
        ranked = [
            (_priority(row[at], f"{self.source} row {n}: {column} ="), row[:at] + row[at + 1 :])
            for n, row in enumerate(self.rows, 1)
        ]
        ranked.sort(key=lambda one: -one[0])
        return dataclasses.replace(
            self,
            names=self.names[:at] + self.names[at + 1 :],
            rows=tuple(row for _, row in ranked),
            priorities=tuple(priority for priority, _ in ranked),
        )


#: No task is more urgent, or can wait longer.
MOST_PRIORITY = 10**9


def check_priority(priority: object, where: str = "--priority") -> int:
    """``priority`` where a task may have it; UsageError otherwise."""
    if type(priority) is not int or abs(priority) > MOST_PRIORITY:
        raise UsageError(
            f"{where} {priority} is not a priority.",
            hint=f"write a whole number from -{MOST_PRIORITY:,} to {MOST_PRIORITY:,}.",
        )
    return priority


def _priority(cell: object, where: str) -> int:
    """An empty cell is 0, and 2.0 is 2: so pandas writes a column in which cells are empty."""
    value: object = cell
    if isinstance(cell, Text):
        with suppress(ValueError):
            value = float(cell)
            value = int(cell)
    if cell is MISSING or value is None or value != value:
        return 0
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return check_priority(value, where)


def check_joined(flag: str, texts: Sequence[str]) -> None:
    """UsageError for words that are one setting typed apart: ``lr 0.1``, ``lr= 0.1,0.2``,
    ``lr = 0.1`` and ``lr=0.1 0.2``."""
    for first, text in enumerate(texts):
        name, _, value = text.partition("=")
        rest = texts[first + 1 :]
        apart = list(itertools.takewhile(lambda word: "=" not in word.strip("="), rest))
        if not apart or not name.strip():
            continue
        values = [word.strip("=, ") for word in (value, *apart)]
        whole = f"{name.strip()}={','.join(filter(None, values))}"
        raise UsageError(
            f"--{flag} {' '.join((text, *apart))}: a name and its values are one word.",
            hint=f"write --{flag} {shell_word(whole)}.",
        )


def parse_grid(text: str) -> tuple[str, list[object]]:
    """``lr=1e-3,1e-2`` as (name, values).

    Values are `Text`. One in quotes may hold commas and is a plain string: ``tag='a,b',c``. A JSON
    list gives typed values: ``dims=[[8,16],[32]]`` are two values that are lists.
    """
    name, equals, rest = text.partition("=")
    name = name.strip()
    if not equals:
        raise UsageError(
            f"Cannot read {text!r} as parameter values: there is no '='.",
            hint=f"write {text.strip() or 'name'}=VALUE,VALUE.",
        )
    check_parameter_name(name)
    rest = rest.strip()
    if not rest:
        raise UsageError(
            f"Parameter {name} has no values in {text!r}.", hint=f"write {name}=VALUE,VALUE."
        )
    if rest.startswith("["):
        return name, _json_values(name, rest)
    return name, list(_split(name, rest))


def parse_seeds(text: str, offset: int = 0) -> range | tuple[int, ...]:
    """Seeds from ``100`` (a count), ``3,5,8`` (those; ``3,`` is one) or ``10:20`` (10 to 19), plus
    ``offset``.

    >>> list(parse_seeds("3")), list(parse_seeds("3,")), list(parse_seeds("3:5"))
    ([0, 1, 2], [3], [3, 4])
    """
    try:
        if ":" in text:
            start, stop = (int(part) for part in text.split(":"))
            seeds: range | tuple[int, ...] = range(start + offset, stop + offset)
        elif "," in text:
            seeds = tuple(int(part) + offset for part in text.removesuffix(",").split(","))
        else:
            seeds = range(offset, offset + int(text))
    except ValueError:
        raise UsageError(
            f"Cannot read {text!r} as seeds.",
            hint="write a count (100), a list (3,5,8; one seed: 3,) or a range (10:20, without "
            "20).",
        ) from None
    return checked_seeds(seeds, f"{text!r}", offset)


def read_list(path: Path, blank: str | None = "") -> ListRows:
    """The rows of a ``.csv`` file with a header, or of a ``.jsonl`` file with one object a line.

    Every CSV cell must be filled, since an empty one could mean none, nothing or "the default";
    write ``none`` for None. A JSONL line may leave a name out: the function's default applies.
    ``blank``: the column of which cells may be empty all the same; None: any.
    """
    readers: dict[str, Callable[[str, bytes], tuple[tuple[str, ...], list[tuple[object, ...]]]]]
    readers = {".csv": partial(_read_csv, blank), ".jsonl": _read_jsonl}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise UsageError(
            f"Cannot read the list {path}: its name ends in {path.suffix or 'nothing'!r}.",
            hint="give a .csv file with a header, or a .jsonl file with one object per line.",
        )
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(
            f"Cannot read the list {path}: {error.strerror or error}.",
            hint="check the path given to --list.",
        ) from error
    try:
        names, rows = reader(str(path), data)
    except UnicodeDecodeError as error:
        raise UsageError(
            f"Cannot read the list {path}: it is not UTF-8 (byte {error.start}).",
            hint="save it as UTF-8.",
        ) from error
    if not rows:
        raise UsageError(f"The list {path} has no rows.", hint="write one row for each setting.")
    for name in names:
        check_parameter_name(name)
    content = path.absolute().read_bytes
    return ListRows(path.name, names, tuple(rows), sha256(data).hexdigest(), content)


def checked_seeds(
    seeds: range | tuple[int, ...], shown: str, offset: int
) -> range | tuple[int, ...]:
    moved = f" with offset {offset}" if offset else ""
    if not seeds:
        raise UsageError(
            f"No seeds in {shown}{moved}.", hint="give a count of 1 or more, or a range like 0:10."
        )
    if min(seeds) < 0:
        raise UsageError(
            f"Negative seed {min(seeds)} in {shown}{moved}.",
            hint="generators take seeds from 0 on.",
        )
    if isinstance(seeds, tuple) and len(set(seeds)) < len(seeds):
        twice = Counter(seeds).most_common(1)[0][0]
        raise UsageError(
            f"Seed {twice} is given twice in {shown}{moved}: both would compute the same.",
            hint="remove one of them.",
        )
    return seeds


def as_columns(
    rows: Sequence[Mapping[str, object]],
) -> tuple[tuple[str, ...], list[tuple[object, ...]]]:
    names = tuple(dict.fromkeys(itertools.chain.from_iterable(rows)))
    return names, [tuple(row.get(name, MISSING) for name in names) for row in rows]


def _split(name: str, text: str) -> Iterator[str]:
    position = 0
    while True:
        while text[position : position + 1].isspace():
            position += 1
        quote = text[position : position + 1]
        if quote and quote in _QUOTES:
            end = text.find(quote, position + 1)
            if end < 0:
                raise UsageError(
                    f"Parameter {name}: a quote {quote} is opened and never closed in {text!r}.",
                    hint="close it, and put the whole option in the other kind of quotes "
                    "so that the shell leaves them alone.",
                )
            yield text[position + 1 : end]
            rest, comma, _ = text[end + 1 :].partition(",")
            if rest.strip():
                raise UsageError(
                    f"Parameter {name}: {rest.strip()!r} follows a closing quote in {text!r}.",
                    hint="put a comma between two values.",
                )
            position = end + 1 + len(rest) + len(comma)
        else:
            value, comma, _ = text[position:].partition(",")
            if not value.strip():
                raise UsageError(
                    f"Parameter {name} has an empty value in {text!r}.",
                    hint="remove the extra comma, or write '' in quotes for an empty string.",
                )
            yield Text(value.strip())
            position += len(value) + len(comma)
        if not comma:
            return


def _json_values(name: str, text: str) -> list[object]:
    try:
        values = json.loads(text)
    except ValueError as error:
        raise UsageError(
            f"Parameter {name}: cannot read {text!r} as a JSON list ({error}).",
            hint='strings in a JSON list have double quotes: ["a", "b"].',
        ) from None
    if not values:
        raise UsageError(
            f"Parameter {name} has no values in {text!r}.", hint=f"write {name}=VALUE,VALUE."
        )
    return list(values)


def _read_csv(
    blank: str | None, path: str, data: bytes
) -> tuple[tuple[str, ...], list[tuple[object, ...]]]:
    import csv  # here: few sweeps have a list

    # utf-8-sig: spreadsheets put a byte order mark in front, which would join the first name.
    reader = csv.reader(io.StringIO(data.decode("utf-8-sig"), newline=""))
    header = tuple(cell.strip() for cell in next(reader, []))
    if len(set(header)) < len(header):
        twice = next(name for name in header if header.count(name) > 1)
        raise UsageError(
            f"The list {path} has two columns named {twice!r}.", hint="rename or remove one."
        )
    known: dict[str, Text] = {}
    rows: list[tuple[object, ...]] = []
    for cells in reader:
        if not cells:
            continue
        if len(cells) != len(header):
            raise UsageError(
                f"{path} line {reader.line_num} has {len(cells)} cells, the header has "
                f"{len(header)}.",
                hint="put cells that hold commas in double quotes.",
            )
        for column, cell in zip(header, cells, strict=True):
            if not cell.strip() and blank not in (None, column):
                raise UsageError(
                    f"{path} line {reader.line_num}: the cell of {column} is empty.",
                    hint="write none for no value; to leave a parameter to its default in some "
                    "rows only, use a .jsonl list.",
                )
        rows.append(
            tuple(
                known.setdefault(cell, Text(cell.strip())) if cell.strip() else MISSING
                for cell in cells
            )
        )
    return header, rows


def _read_jsonl(path: str, data: bytes) -> tuple[tuple[str, ...], list[tuple[object, ...]]]:
    objects: list[Mapping[str, object]] = []
    for number, line in enumerate(data.decode("utf-8-sig").split("\n"), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise UsageError(
                f"{path} line {number} is not JSON: {error}.", hint="write one object on each line."
            ) from None
        if not isinstance(value, dict):
            raise UsageError(
                f"{path} line {number} is not an object but {line.strip()[:40]!r}.",
                hint='write {"name": value, ...} on each line.',
            )
        objects.append(value)
    return as_columns(objects)
