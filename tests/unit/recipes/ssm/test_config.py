"""Settings that contradict each other or mean nothing are refused before any work."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from muster import UsageError
from muster_recipes.ssm.config import SsmConfig


def test_seeds_are_counted_or_listed_and_shifted() -> None:
    assert SsmConfig(num_seeds=3, seed_offset=5).all_seeds == (5, 6, 7)
    assert SsmConfig(seeds=(9, 2), seed_offset=1).all_seeds == (10, 3)


@pytest.mark.parametrize("name", ["eps_train", "gd_lr", "gd_init_scale"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_a_positive_number_is_finite_too(name: str, value: float) -> None:
    with pytest.raises(UsageError, match="must be above 0 and finite"):
        SsmConfig(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [math.nan, -math.inf, 1e200])
def test_a_fixed_pole_and_its_powers_are_numbers(value: float) -> None:
    with pytest.raises(UsageError, match="is not a finite number, or its powers are not"):
        SsmConfig(alpha=value)


@pytest.mark.parametrize(("name", "value"), [("alpha", 0.0), ("input_e1", True)])
def test_what_a_data_file_gives_cannot_be_given_twice(
    tmp_path: Path, name: str, value: Any
) -> None:
    path = tmp_path / "data.json"
    path.write_text('[{"alpha": 0.5, "w_sequences": [[1, 0, 0, 0]]}]')
    SsmConfig(data_file=path)
    with pytest.raises(UsageError, match="has no effect beside --data-file"):
        SsmConfig(data_file=path, **{name: value})


def test_a_mistake_in_the_data_file_shows_before_the_start(tmp_path: Path) -> None:
    path = tmp_path / "data.json"
    path.write_text(
        '[{"alpha": 0.5, "w_sequences": [[1, 0, 0, 0]]}, {"alpha": 0.5, "w_sequences": [[1, 0]]}]'
    )
    with pytest.raises(UsageError, match="entry 1: each sequence needs 4 numbers"):
        SsmConfig(data_file=path, num_seeds=1)
