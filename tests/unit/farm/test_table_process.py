"""The table is written in a process of its own, which imports neither NumPy nor pandas."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.unit.farm.test_plain_blocks import HOSTILE, Values, make_run

from muster.farm.export import refresh

PROGRAM = """
import sys
from muster.farm.table_process import main
main([sys.argv[1]])
assert not {"numpy", "pandas"} & sys.modules.keys()
"""


def _floats(number: int) -> Values:
    return {"y": number / 7, "z": (-1) ** number * 2.0**62, "m": {"a": [1.5, None, number]}}


@pytest.mark.parametrize("values", ["floats", "hostile"])
def test_its_files_are_the_same_byte_for_byte(values: str, tmp_path: Path) -> None:
    def value_of(number: int) -> Values:
        return HOSTILE[number % len(HOSTILE)] if values == "hostile" else _floats(number)

    folder = make_run(tmp_path / "run", lambda number: {"x": number / 3}, value_of)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder.path)], capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    places = folder.results_csv, folder.results_parquet
    apart = [place.read_bytes() for place in places]
    refresh(folder)
    assert apart == [place.read_bytes() for place in places]
