"""Where the target stands in the words of a command.

What a command runs decides which flags there are: a recipe and a class of the user's have their
own. So the target is looked for before the flags are read, and among them: ``muster sweep --seeds 3
train.py:run``. The flags that the command has in any case say which words are values of theirs; of
a flag that is not among these it is not known whether it takes a value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

from muster.base.flags import kind_of_word, own_words
from muster.cli.options import Option, flag_name, flags_by_name, options_of

_HELP = {"help", "h", "help-all"}


#: What stands behind a flag and is never a target, though it looks like one.
_NEVER = {"notify": ("command:", "mail:")}


class _Rank(IntEnum):
    """How a word stands to the flag before it, the best place for a target first."""

    FREE = 0  # no flag can have it
    BEHIND_VALUES = 1  # of a flag that takes any number, or of one that is not known here
    BEHIND_FLAG = 2  # right behind such a flag, or one whose value only `=` can join to it


class _Place(NamedTuple):
    """A word that may be a target; ``order``: of two in the same rank, the lesser is it."""

    rank: _Rank
    order: tuple[int, int]
    at: int


def split_target(
    words: Sequence[str],
    is_it: Callable[[str], bool],
    flags: Callable[[], Iterable[Any]],
    *,
    has_program: bool = False,
) -> tuple[str, list[str]]:
    """The target, "" where there is none, and the other words.

    A word in front is the target. Behind flags it is a word that looks like one (``is_it``) and is
    no value of a flag, or else any word that no flag can have. ``flags``: the groups of options
    that the command has whatever its target is; asked for only where flags stand in front.
    ``has_program``: a program follows ``--``, so that there need be no target: what a flag can have
    is a value of it.
    """
    if not words or kind_of_word(words[0]) == "value":
        return (words[0] if words else ""), list(words[1:])
    found = [
        (not is_it(words[place.at]), *place)
        for place in _places(words, _known(flags))
        if place.rank is _Rank.FREE or (is_it(words[place.at]) and not has_program)
    ]
    if not found:
        return "", list(words)
    *_, at = min(found)
    return words[at], [*words[:at], *words[at + 1 :]]


def possible_targets(words: Sequence[str], flags: Callable[[], Iterable[Any]]) -> list[str]:
    """The words that are no values of ``flags``, whether they look like targets or not."""
    known = _known(flags)
    return [
        words[place.at]
        for place in _places(words, known)
        if place.rank is not _Rank.BEHIND_FLAG or flag_name(words[place.at - 1]) not in known
    ]


def _known(flags: Callable[[], Iterable[Any]]) -> dict[str, Option]:
    return flags_by_name([option for group in flags() for option in options_of("", group)])


def _places(words: Sequence[str], known: Mapping[str, Option]) -> Iterator[_Place]:
    """The words that may be a target: neither flags nor the values that a flag is known to take."""
    rank, left, flag_at = _Rank.BEHIND_VALUES, 0.0, 0
    never: tuple[str, ...] = ()
    for at, word in enumerate(own_words(words)):
        if kind_of_word(word) == "value":
            if left == 0 and rank is not _Rank.BEHIND_FLAG:
                yield _Place(_Rank.FREE, (at, 0), at)
            elif left in (0, math.inf) and not word.startswith(never):
                # Of the values of one flag the last: those before it are the flag's.
                yield _Place(rank, (flag_at, -at), at)
            left, rank = max(0, left - 1), _Rank.BEHIND_VALUES
            continue
        name, has_value, flag_at = flag_name(word), "=" in word, at
        never = _NEVER.get(name, ())
        left = max(0, _values_of(word, known) - has_value)
        is_open = left == math.inf or (name in known and known[name].flag.alone is not None)
        rank = _Rank.BEHIND_FLAG if is_open and not has_value else _Rank.BEHIND_VALUES


def _values_of(word: str, known: Mapping[str, Option]) -> float:
    """How many words are values of the flag in ``word``; infinity where any number may be."""
    name = flag_name(word)
    if name in known:
        number = known[name].num_words(name)
        return math.inf if number is None else number
    return 0 if name in _HELP or name.removeprefix("no-") in known else math.inf
