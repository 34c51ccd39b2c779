"""Where the settings of a search come from, and its random numbers: each depends on what it is for
and on nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from random import Random
from typing import Any, Protocol

from muster.search.spec import SearchSpec
from muster.search.trials import Trial


def seed_for(seed: int, purpose: str, *numbers: int) -> int:
    """A seed of 32 bits for this purpose; the same for ever."""
    text = f"{seed} {purpose} {' '.join(map(str, numbers))}"
    return int.from_bytes(blake2b(text.encode(), digest_size=4).digest(), "big")


def random_for(seed: int, purpose: str, *numbers: int) -> Random:
    return Random(seed_for(seed, purpose, *numbers))


class Sampler(Protocol):
    """What a search asks of a sampler; the order of the calls is its only state."""

    def pick(self, number: int) -> dict[str, Any]:
        """The setting of trial ``number``."""
        ...

    def fix(self, number: int, params: Mapping[str, Any]) -> None:
        """Trial ``number`` has this setting, whatever was picked."""
        ...

    def recall(self, number: int, params: Mapping[str, Any], by: str) -> None:
        """The same as the `pick` or `fix` that this trial once came from."""
        ...

    def tell(self, trial: Trial) -> None:
        """This trial has ended, or rests at a mark."""
        ...


class RandomSampler:
    """Each parameter drawn by itself, by Muster's own draws: it needs no package."""

    def __init__(self, spec: SearchSpec) -> None:
        self._spec = spec

    def pick(self, number: int) -> dict[str, Any]:
        return self._spec.space.draw(random_for(self._spec.seed, "random", number))

    def fix(self, number: int, params: Mapping[str, Any]) -> None: ...

    def recall(self, number: int, params: Mapping[str, Any], by: str) -> None: ...

    def tell(self, trial: Trial) -> None: ...


def make_sampler(spec: SearchSpec) -> Sampler:
    """The sampler that the specification names; all but ``random`` are Optuna's."""
    if spec.sampler == "random":
        return RandomSampler(spec)
    from muster.search.optuna_study import StudySampler

    return StudySampler(spec)
