"""Random numbers that depend on what they are for and on nothing else."""

from __future__ import annotations

from hashlib import blake2b
from random import Random


def seed_for(seed: int, purpose: str, *numbers: int) -> int:
    """A seed of 32 bits for this purpose; the same for ever."""
    text = f"{seed} {purpose} {' '.join(map(str, numbers))}"
    return int.from_bytes(blake2b(text.encode(), digest_size=4).digest(), "big")


def random_for(seed: int, purpose: str, *numbers: int) -> Random:
    return Random(seed_for(seed, purpose, *numbers))
