"""docs/architecture.md shows the packages as they are and names files that are there."""

from __future__ import annotations

import html
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "architecture.md"


def test_the_picture_shows_the_packages_and_their_imports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    try:
        import draw_architecture
    finally:
        sys.modules.pop("draw_architecture", None)
    again = "The packages have changed. Run: python scripts/draw_architecture.py"
    assert len(draw_architecture.PICTURES) == 2
    for file, of in draw_architecture.PICTURES.items():
        drawn = re.findall("<desc>(.*?)</desc>", file.read_text(), re.DOTALL)
        assert html.unescape(drawn[0]) == draw_architecture.described(of), again
        assert set(draw_architecture.PURPOSES[of]) == set(draw_architecture.boxes(of)), again
        assert f"]({file.name})" in PAGE.read_text()


def test_the_page_names_what_is_there() -> None:
    text = PAGE.read_text()
    made_here = set(re.findall(r"<!-- file: (.*?) -->", text))
    named = set(re.findall(r"`(src/[\w/.]+|scripts/[\w.]+)`", text)) - made_here
    assert len(named) > 15
    assert not [path for path in named if not (ROOT / path).exists()]
