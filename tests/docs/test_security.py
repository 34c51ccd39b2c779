"""Each line of docs/security.md names tests that show it, and these exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "security.md"
_NAMED = re.compile(r"`([\w/]+\.py)::(test_\w+)`")


def _rows() -> list[str]:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    return [line for line in lines if not line.startswith(("| | ", "| --- "))]


def test_each_line_names_a_test() -> None:
    assert len(_rows()) > 15
    assert [row for row in _rows() if not _NAMED.search(row)] == []


def test_the_tests_that_are_named_exist() -> None:
    named = set(_NAMED.findall(PAGE.read_text()))
    there = {}
    for file in {file for file, _ in named}:
        tree = ast.parse((TESTS / file).read_text())
        there[file] = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    assert [pair for pair in sorted(named) if pair[1] not in there[pair[0]]] == []
