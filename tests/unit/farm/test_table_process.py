"""The table is written in a process of its own, which imports neither NumPy nor pandas."""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from tests.unit.farm.test_plain_blocks import HOSTILE, Values, make_run

from muster.base.errors import SetupError
from muster.farm.export import refresh
from muster.farm.table_process import AHEAD
from muster.farm.table_writer import TableWriter, exporter
from muster.run.folder import RunFolder

PROGRAM = """
import sys
from muster.farm.table_process import main
main([sys.argv[1]])
assert not {"numpy", "pandas", "cloudpickle"} & sys.modules.keys()
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


@pytest.mark.skipif(sys.platform == "win32", reason="no process waits there")
@pytest.mark.parametrize("is_lost", [False, True], ids=["waits", "killed meanwhile"])
def test_a_process_may_be_begun_before_there_is_something_to_write(
    is_lost: bool, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with closing(TableWriter(RunFolder(run))) as writer:
        writer.begin()
        assert writer._ahead is not None
        if is_lost:
            writer._ahead.kill()
        folder = make_run(run, lambda number: {"x": number}, _floats)
        writer.write()
        assert folder.results_csv.read_bytes().count(b"\n") > 1
        writer.begin()  # once only
        assert writer._ahead is None


@pytest.mark.skipif(sys.platform == "win32", reason="no process waits there")
def test_a_process_that_waits_in_vain_ends(tmp_path: Path) -> None:
    """With whoever has begun it, and where the work is never over."""
    folder = RunFolder(tmp_path)
    with closing(TableWriter(folder)) as writer:
        writer.begin()
        waiting = writer._ahead
    assert waiting is not None
    assert waiting.returncode == -signal.SIGKILL
    argv, environment = exporter(folder)
    done = subprocess.run(
        [*argv, AHEAD], stdin=subprocess.DEVNULL, env=environment, capture_output=True, check=False
    )
    assert (done.returncode, done.stderr) == (1, b"")
    assert not list(tmp_path.iterdir())


def test_a_process_that_finds_no_room_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_run(tmp_path / "run", lambda number: {"x": number}, _floats)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    with closing(TableWriter(folder)) as writer:
        writer.begin()
        with pytest.raises(SetupError, match=r"All results are in .* could not be started: "):
            writer.write()
