"""The values parameters take in a space: their marks, names, texts and when two are the same."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

from muster.base.errors import TargetError, UsageError
from muster.farm.canonical import encode_canonical

_NAME = re.compile(r"[A-Za-z_][\w./-]*\Z")


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


def check_name(name: str) -> None:
    if _NAME.match(name):
        return
    bare = name.lstrip("-")
    raise UsageError(
        f"{name!r} is not a parameter name.",
        hint=f"did you mean {bare!r}?"
        if _NAME.match(bare)
        else "a name starts with a letter or '_' and has no spaces.",
    )
