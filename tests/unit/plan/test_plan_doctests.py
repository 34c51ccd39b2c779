from __future__ import annotations

import doctest
import importlib

import pytest


@pytest.mark.parametrize("name", ["units", "communication", "scaling", "compute"])
def test_the_examples_in_docstrings_are_true(name: str) -> None:
    failed, count = doctest.testmod(importlib.import_module(f"muster.plan.{name}"))
    assert count > 0 and failed == 0
