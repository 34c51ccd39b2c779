"""Whether a command goes to SLURM, known before anything heavy is imported."""

from __future__ import annotations

from collections.abc import Sequence


def wants_slurm(words: Sequence[str]) -> bool:
    """Whether ``--on slurm`` is among them, before anything is parsed."""
    pairs = zip(words, [*words[1:], ""], strict=False)
    return any(word == "--on=slurm" or (word, value) == ("--on", "slurm") for word, value in pairs)
