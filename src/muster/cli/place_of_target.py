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
from typing import Any

from muster.base.flags import kind_of_word, own_words
from muster.cli.options import Option, flag_name, flags_by_name, options_of

_HELP = {"help", "h", "help-all"}


class _Place(IntEnum):
    """How a word stands to the flag before it, the best place for a target first."""

    FREE = 0  # no flag can have it
    BEHIND_VALUES = 1  # of a flag that takes any number, or of one that is not known here
    BEHIND_FLAG = 2  # right behind such a flag


def split_target(
    words: Sequence[str], is_it: Callable[[str], bool], flags: Callable[[], Iterable[Any]]
) -> tuple[str, list[str]]:
    """The target, "" where there is none, and the other words.

    A word in front is the target. Behind flags it is a word that looks like one (``is_it``) and is
    no value of a flag, or else any word that no flag can have. ``flags``: the groups of options
    that the command has whatever its target is; asked for only where flags stand in front.
    """
    if not words or kind_of_word(words[0]) == "value":
        return (words[0] if words else ""), list(words[1:])
    options = [option for group in flags() for option in options_of("", group)]
    found = [
        (not is_it(words[at]), place, at)
        for at, place in _places(words, flags_by_name(options))
        if place is _Place.FREE or is_it(words[at])
    ]
    if not found:
        return "", list(words)
    at = min(found)[2]
    return words[at], [*words[:at], *words[at + 1 :]]


def _places(words: Sequence[str], known: Mapping[str, Option]) -> Iterator[tuple[int, _Place]]:
    """The words that may be a target: neither flags nor the values that a flag is known to take."""
    place, left = _Place.FREE, 0.0
    for at, word in enumerate(own_words(words)):
        if kind_of_word(word) == "value":
            if left in (0, math.inf):
                yield at, place if left else _Place.FREE
            left, place = max(0, left - 1), _Place.BEHIND_VALUES
            continue
        has_value = "=" in word
        left = max(0, _values_of(word, known) - has_value)
        place = _Place.BEHIND_VALUES if has_value else _Place.BEHIND_FLAG


def _values_of(word: str, known: Mapping[str, Option]) -> float:
    """How many words are values of the flag in ``word``; infinity where any number may be."""
    name = flag_name(word)
    if name in known:
        number = known[name].num_words(name)
        return math.inf if number is None else number
    return 0 if name in _HELP or name.removeprefix("no-") in known else math.inf
