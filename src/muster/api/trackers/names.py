"""Names as trackers take them. Each name has its own, so that it can be turned back.

Whatever a tracker does not take becomes ``-x`` with the character's code and another ``-``:
``loss²`` is ``loss-xb2-``. A dash before an x is replaced as well.
"""

from __future__ import annotations

import re

_PIECE = re.compile(r"-x([0-9a-f]+)-")


def to_tracker(name: str, allowed: re.Pattern[str], *, taken: frozenset[str] = frozenset()) -> str:
    """``name`` in the characters that ``allowed`` matches one by one; ``taken``: the tracker's own.

    >>> to_tracker("loss²", re.compile("[a-z0-9_]"))
    'loss-xb2-'
    >>> to_tracker("step", re.compile("[a-z]"), taken=frozenset({"step"}))
    'ste-x70-'
    """
    if not name:
        return "-x-"
    following = [*name[1:], ""]
    mapped = "".join(
        character
        if (character == "-" and after != "x")
        or (character != "-" and allowed.fullmatch(character))
        else _piece(character)
        for character, after in zip(name, following, strict=True)
    )
    return mapped[:-1] + _piece(mapped[-1]) if mapped in taken else mapped


def from_tracker(mapped: str) -> str:
    """The name that `to_tracker` was given.

    >>> from_tracker("loss-xb2-")
    'loss²'
    """
    if mapped == "-x-":
        return ""
    return _PIECE.sub(lambda match: chr(int(match[1], 16)), mapped)


def escape_first(mapped: str) -> str:
    """For a name whose first character has a meaning to the tracker.

    >>> from_tracker(escape_first("_step"))
    '_step'
    """
    return _piece(mapped[0]) + mapped[1:]


def _piece(character: str) -> str:
    return f"-x{ord(character):x}-"
