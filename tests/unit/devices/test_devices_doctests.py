"""The examples in the docstrings of this layer are true."""

from __future__ import annotations

import doctest
import importlib

import pytest


@pytest.mark.parametrize("name", ["discovery", "inventory", "packing", "cards"])
def test_the_examples_in_the_docstrings_hold(name: str) -> None:
    result = doctest.testmod(importlib.import_module(f"muster.devices.{name}"))
    assert result.attempted > 0
    assert result.failed == 0
