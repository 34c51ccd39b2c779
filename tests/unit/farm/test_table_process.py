"""The table is written in a process of its own, which imports neither NumPy nor pandas."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from tests.unit.farm.test_plain_blocks import HOSTILE, Values, make_run

from muster.base.errors import SetupError
from muster.farm.export import refresh
from muster.farm.table_writer import TableWriter

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


def test_what_a_kill_has_left_of_a_table_is_gone_with_the_next(tmp_path: Path) -> None:
    """It may be as large as the table, and there is one more after each kill."""
    folder = make_run(tmp_path / "run", lambda number: {"x": number}, _floats)
    left = [folder.path / f".results.{kind}.0123abcd.tmp" for kind in ("csv", "parquet")]
    mine = folder.path / ".results.csv.mine.tmp"
    for path in (*left, mine):
        path.write_text("half")
    refresh(folder)
    assert [path for path in (*left, mine) if path.exists()] == [mine]


@pytest.mark.skipif(sys.platform == "win32", reason="none is begun ahead")
@pytest.mark.parametrize("is_killed", [False, True])
def test_a_process_that_is_begun_ahead_writes_the_table_or_another_does(
    is_killed: bool, tmp_path: Path
) -> None:
    """What waits may be ended by who needs its memory."""
    folder = make_run(tmp_path / "run", lambda number: {"x": number}, _floats)
    with closing(TableWriter(folder)) as writer:
        writer.begin()
        [process] = psutil.Process().children()
        if is_killed:
            process.kill()
        writer.write()
        assert not process.is_running()
    assert folder.results_csv.exists() and folder.results_parquet.exists()


def test_a_process_that_finds_no_room_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_run(tmp_path / "run", lambda number: {"x": number}, _floats)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    with closing(TableWriter(folder)) as writer:
        writer.begin()
        with pytest.raises(SetupError, match=r"All results are in .* could not be started: "):
            writer.write()
