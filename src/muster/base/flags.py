"""How the fields of an options dataclass are said on a command line.

A field's name, type, default and docstring are its flag. ``Flag``, in an ``Annotated`` type, adds
what these cannot say.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Literal, get_args, get_type_hints

from muster.base.errors import UsageError, flag_of

#: From a text and the flag that it was given to (for the message) to the value.
Reader = Callable[[str, str], Any]


@dataclass(frozen=True, kw_only=True)
class Alias:
    """Another name of a flag, which is understood and not shown.

    ``read``: how its value is read, where it differs; ``means``: the value that it stands for,
    where none follows it.
    """

    name: str
    read: Reader | None = None
    means: Any = None


@dataclass(frozen=True, kw_only=True)
class Flag:
    """What a field's name, type and docstring do not say about its flag.

    Attributes
        name: the flag, where it is not called like the field.
        aliases: other names; they are understood and not shown.
        metavar: what the value looks like, such as ``auto|N|0,2|cpu:8``.
        read: from a text to the value, where the type does not say it.
        is_positional: a word without a flag.
        chooses: what it chooses, as ``the devices``; of all flags that choose it, one is given.
        engines: with which of ``--on local|slurm|ray`` it has an effect; empty: with all.
        alone: the value where none is joined to it by ``=``, as for ``--wait`` and ``--wait=2h``.
        is_negated: the flag says False, as ``--no-ids`` for ``keeps_ids``.
        is_hidden: not an option of the command line, or one that only old commands have.
    """

    name: str = ""
    aliases: tuple[str | Alias, ...] = ()
    metavar: str = ""
    read: Reader | None = None
    is_positional: bool = False
    chooses: str = ""
    engines: tuple[str, ...] = ()
    alone: Any = None
    is_negated: bool = False
    is_hidden: bool = False


def typed_flag(settings: Any, name: str) -> str:
    """How the field ``name`` of an options dataclass is typed, as ``--try`` for ``tries``."""
    kind = get_type_hints(type(settings), include_extras=True)[name]
    about = (one for one in get_args(kind)[1:] if isinstance(one, Flag))
    return "--" + (next(about, Flag()).name or flag_of(name))


#: Between two samples of devices: below this the monitor itself would be what is measured.
LEAST_INTERVAL_S = 0.05


def check_interval(interval_s: float, flag: str, *, may_be_0: bool = False) -> None:
    """Raise UsageError, naming ``flag``, for an interval that is too short; 0 may mean never."""
    if interval_s >= LEAST_INTERVAL_S or (may_be_0 and interval_s == 0):
        return
    never = ", or 0 to record nothing" if may_be_0 else ""
    raise UsageError(
        f"{flag} {interval_s:g} is too short.", hint=f"write {LEAST_INTERVAL_S} or more{never}."
    )


def check_least(settings: Any, **least: float) -> None:
    """UsageError, named as the flag is, for a field of an options dataclass below its least value.

    None is an option that was not given.
    """
    for name, lowest in least.items():
        value = getattr(settings, name)
        if value is not None and not value >= lowest:
            flag = typed_flag(settings, name)
            raise UsageError(f"{flag} {value} is too small.", hint=f"write {lowest} or more.")


_FLAG = re.compile(r"-+[^\W\d]|--\d")  # -5 and -.5 are numbers, -1,2 and -1:3 are values too


def kind_of_word(word: str, *, is_ours: bool = True) -> Literal["flag", "value", "end"]:
    """What a word of a command line is: all that look at words one by one ask here. ``--`` ends
    the flags; ``-inf`` is a number. ``is_ours``: of a Muster command; a program of somebody else
    may have a flag ``-19``.
    """
    if word == "--":
        return "end"
    if not is_ours:
        return "flag" if word.startswith("-") else "value"
    is_flag = _FLAG.match(word) is not None and " " not in word.partition("=")[0]
    return "flag" if is_flag and not _is_number(word) else "value"


def own_words(words: Sequence[str]) -> list[str]:
    """The words before ``--``, which are Muster's and not those of a program."""
    return list(takewhile(lambda word: kind_of_word(word) != "end", words))


def wants_help(words: Iterable[str]) -> bool:
    """Whether one of these words asks for help, before anything is parsed."""
    return not {"-h", "--help", "--help-all", "--help_all"}.isdisjoint(words)


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|sec|m|min|h|d)?")
_UNITS = {"ms": 0.001, "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def parse_duration(text: str, flag: str) -> float:
    """Seconds in ``90``, ``90s``, ``30m``, ``2h``, ``1h30m``, ``1d``.

    >>> parse_duration("1h30m", "--timeout")
    5400.0
    """
    parts = list(_DURATION.finditer(text))
    if not parts or "".join(part.group(0) for part in parts) != text.strip():
        raise UsageError(
            f"{flag} {text}: cannot read this as a duration.", hint="write 90, 30m, 2h or 1h30m."
        )
    return sum(float(part.group(1)) * _UNITS[part.group(2) or "s"] for part in parts)


def parse_memory_mib(text: str, flag: str) -> float:
    """MiB in ``900M``, ``8G``, ``1.5GiB`` or plain bytes.

    >>> parse_memory_mib("2G", "--max-worker-memory")
    2048.0
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKmMgGtT]?)(?:i?[bB])?\s*", text)
    if match is None:
        raise UsageError(f"{flag} {text}: write 8G, 900M or a number of bytes.")
    power = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}[match.group(2).lower()]
    return float(match.group(1)) * 1024.0**power / (1 << 20)
