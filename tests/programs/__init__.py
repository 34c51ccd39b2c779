"""Programs that tests hand to Muster as a user's files; here so that the linter sees them."""

from __future__ import annotations

from pathlib import Path

_FOLDER = Path(__file__).parent


def read_program(name: str) -> str:
    """The text of ``tests/programs/NAME``."""
    return (_FOLDER / name).read_text()


def slow_task(step_s: float) -> str:
    """A training whose steps take ``step_s`` each, so that something can happen in the middle."""
    return read_program("slow_task.py").replace("STEP_S = 0.05", f"STEP_S = {step_s!r}")
