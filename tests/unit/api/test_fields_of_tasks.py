"""What the fields of a task may be, which a run's record keeps."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import date
from enum import Enum

import pytest

from muster.api.gangs.train import job_of_target
from muster.base.errors import TargetError
from muster.cli.options import Part
from muster.cli.parse import parse_groups
from muster.rank.task import make
from muster.train.config import TrainConfig


class Mode(Enum):
    FAST = 1
    SLOW = 2


@dataclass(frozen=True, kw_only=True)
class Own:
    mode: Mode = Mode.FAST
    names: set[str] = field(default_factory=set)
    since: date | None = None


def test_a_field_of_an_enum_or_a_set_gets_to_the_ranks() -> None:
    """It ended in a traceback: "Object of type Mode is not JSON serializable"."""
    words = "--mode SLOW --names b a".split()
    parsed = parse_groups({"task": Part(of=Own, is_loose=True)}, words, "train", "")
    job = job_of_target(f"{__file__}:Own", vars(parsed.task), TrainConfig())
    assert job.values == {"mode": "SLOW", "names": ["a", "b"], "since": None}
    assert make(Own, "own.py:Own", None, job.values) == Own(mode=Mode.SLOW, names={"a", "b"})


def test_a_field_that_cannot_be_kept_is_named() -> None:
    with pytest.raises(TargetError, match=r"field since of .*:Own cannot be kept .*date"):
        job_of_target(f"{__file__}:Own", {"since": date(2020, 1, 1)}, TrainConfig())
