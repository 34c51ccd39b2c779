"""The figures of docs/measurements.md are those that the benchmarks have recorded."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
WRITER = runpy.run_path(str(ROOT / "docs/generate_measurements.py"))


def test_the_page_holds_what_was_recorded() -> None:
    """Renew: python docs/generate_measurements.py"""
    page = (ROOT / "docs/measurements.md").read_text()
    assert WRITER["written"](page, ROOT / "benchmarks/results") == page
    named = {path.stem for path in (ROOT / "benchmarks/results").glob("*.json")}
    assert all(f"<!-- figures: {name} -->" in page for name in named), "one is shown nowhere"


def test_every_benchmark_has_a_place_on_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)  # measuring.py does without it
    """So that what a full run keeps in benchmarks/results is shown."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    benchmarks = runpy.run_path(str(ROOT / "benchmarks/all.py"))["NAMES"]
    page = (ROOT / "docs/measurements.md").read_text()
    assert [name for name in benchmarks if f"<!-- figures: {name} -->" not in page] == []


def test_goals_are_one_table_and_what_has_no_record_stays(tmp_path: Path) -> None:
    goal = {"what": "w", "wanted": "≥ 2", "measured": "1", "is_held": False}
    about = {"date": "2026-01-02", "processor": "P", "cores": 2, "kernel": "6", "versions": {}}
    record = {"command": "c", "machine": about, "tables": [], "goals": [goal, goal]}
    (tmp_path / "x.json").write_text(WRITER["json"].dumps(record))
    page = "<!-- goals -->\n<!-- end -->\n<!-- figures: y -->\nby hand\n<!-- end -->\n"
    found = WRITER["written"](page, tmp_path)
    assert found.count("| x | w | ≥ 2 | 1 | **missed** | 2026-01-02 |") == 2
    assert "by hand" in found and WRITER["written"](found, tmp_path) == found


def test_other_figures_change_the_page(tmp_path: Path) -> None:
    about = {"date": "2026-01-02", "processor": "P", "cores": 2, "kernel": "6", "versions": {}}
    tables: list[dict[str, Any]] = [{"caption": "", "headers": ["a"], "rows": [["b|c"]]}]
    record = {"command": "python x.py", "machine": about, "tables": tables}
    (tmp_path / "x.json").write_text(WRITER["json"].dumps(record))
    page = "before\n<!-- figures: x -->\nold\n<!-- end -->\nafter\n"
    found = WRITER["written"](page, tmp_path)
    assert "| b\\|c |" in found and "old" not in found
    assert found.startswith("before\n") and found.endswith("<!-- end -->\nafter\n")
    assert WRITER["written"](found, tmp_path) == found
