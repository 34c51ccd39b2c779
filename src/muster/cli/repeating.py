"""A command line that is used again, without some of its flags."""

from __future__ import annotations

from collections.abc import Collection, Sequence

#: Never repeated: what was shown then, what would throw away what there is now, and what was
#: accepted knowingly that one time.
_SWITCHES = {"quiet", "json", "dry_run", "restart", "overwrite", "allow_changed_code"}
_WITH_VALUE = {"log_level"}


def flag_name(word: str) -> str:
    """``run_dir`` for ``--run-dir=here``."""
    return word.lstrip("-").partition("=")[0].replace("-", "_")


def without(words: Sequence[str], flags: Collection[str]) -> list[str]:
    """``words`` without these flags and their values, and without switches of the moment.

    >>> without(["a.py:f", "--grid", "x=1", "y=2", "--mem=1G", "--quiet", "--seeds", "3"], {"mem"})
    ['a.py:f', '--grid', 'x=1', 'y=2', '--seeds', '3']
    """
    kept: list[str] = []
    skipping = False
    for word in words:
        if word.startswith("--"):
            skipping = flag_name(word) in flags or flag_name(word) in _WITH_VALUE
            if flag_name(word) in _SWITCHES:
                skipping = False
                continue
        if not skipping:
            kept.append(word)
    return kept
