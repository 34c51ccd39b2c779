"""The keywords of ``muster.sweep``, ``muster.map`` and ``muster.fit`` are the fields of options."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from muster.api.start.options import (
    DeviceOptions,
    KeptOptions,
    MapSettings,
    SweepOptions,
    options_of_call,
)
from muster.base.errors import UnknownNameError
from muster.pipeline.sources.source import Selection
from muster.pipeline.sources.table import InputOptions
from muster.train.config import TrainConfig

OF_MAP = (MapSettings, SweepOptions, Selection, InputOptions)


def test_each_keyword_goes_to_the_class_that_has_it() -> None:
    given = {"batch_size": 8, "devices": "cpu:2", "run_dir": "runs/a", "limit": 3, "split": "test"}
    settings, options, selection, reading = options_of_call("map", given, *OF_MAP)
    assert settings == MapSettings(batch_size=8)
    assert options == SweepOptions(devices="cpu:2", run_dir=Path("runs/a"))
    assert selection == Selection(limit=3)
    assert reading == InputOptions(split="test")


def test_one_place_to_be_notified_is_one() -> None:
    for given in ("mail:me@example.org", ["mail:me@example.org"]):
        (options,) = options_of_call("sweep", {"notify": given}, SweepOptions)
        assert options.notify == ("mail:me@example.org",)


def test_a_keyword_of_none_is_refused_with_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="Unknown option of map 'limits'"):
        options_of_call("map", {"limits": 3}, *OF_MAP)


@pytest.mark.parametrize("kinds", [OF_MAP, (TrainConfig, DeviceOptions, KeptOptions)])
def test_no_keyword_has_two_meanings(kinds: tuple[type, ...]) -> None:
    names = [field.name for kind in kinds for field in fields(kind)]
    assert len(names) == len(set(names))
