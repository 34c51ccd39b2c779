"""The examples in the docstrings of what speaks to SLURM."""

from __future__ import annotations

import doctest
import importlib

import pytest


@pytest.mark.parametrize(
    "name",
    [
        "muster.slurm.request",
        "muster.slurm.script",
        "muster.slurm.states",
        "muster.base.flags",
    ],
)
def test_examples_in_docstrings(name: str) -> None:
    failed, count = doctest.testmod(importlib.import_module(name))
    assert count > 0 and failed == 0
