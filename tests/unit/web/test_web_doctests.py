"""The examples in the docstrings of the dashboard are true."""

from __future__ import annotations

import doctest
import importlib

import pytest


@pytest.mark.parametrize("name", ["query", "content.plain", "content.runs", "pages.markup"])
def test_what_the_docstrings_show_is_so(name: str) -> None:
    result = doctest.testmod(importlib.import_module(f"muster.web.{name}"))
    assert result.attempted > 0
    assert result.failed == 0
