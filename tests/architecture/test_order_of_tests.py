"""How the suite runs: the longest is begun first, and the last line says what was skipped."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.longest_first import TABLE, table

TESTS = TABLE.parent
BEGIN = f"""
import sys
from pathlib import Path

sys.path.insert(0, {str(TESTS.parent)!r})
from tests import longest_first

longest_first.TABLE = Path(__file__).with_name("longest.txt")
"""


def run(folder: Path, *options: str) -> list[str]:
    """The lines of a run of the tests in ``folder`` beside the suite's own conftest."""
    (folder / "conftest.py").write_text((TESTS / "conftest.py").read_text() + BEGIN)
    words = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "--rootdir", "."]
    done = subprocess.run(
        [*words, *options],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(TESTS.parent)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip().splitlines()


def test_what_is_known_to_take_long_is_there() -> None:
    """A name in the table that has gone would order nothing."""
    root = TESTS.parent
    for line in TABLE.read_text().splitlines():
        name = line.split(maxsplit=1)[1]
        assert (root / name.partition("::")[0]).exists(), name
        for page in re.findall(r"\[(.+)\]", name):
            assert (root / page).exists(), name


def test_the_longest_is_begun_first_and_skips_are_told_last(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / f"test_{name}.py").write_text("def test_one(): pass\ndef test_two(): pass\n")
    (tmp_path / "test_d.py").write_text(
        "import pytest\n"
        "@pytest.mark.parametrize('x', [1, 2, 3])\n"
        "@pytest.mark.skip('no such card')\ndef test_card(x): pass\n"
        "def test_wine(): pytest.skip('no cork')\n"
    )
    (tmp_path / "longest.txt").write_text(" 20 test_b.py\n 300 test_c.py\n")
    lines = run(tmp_path, "-n", "1", "--dist", "loadfile")
    begun = [found[1] for line in lines if (found := re.search(r"(?:PASS|SKIP)\S+ (test_.)", line))]
    assert begun == ["test_c"] * 2 + ["test_b"] * 2 + ["test_d"] * 4 + ["test_a"] * 2
    assert lines[-1] == "Skipped: 4 of the tests: 3 × no such card; 1 × no cork"


@pytest.mark.thorough
def test_that_none_was_skipped_is_told_too(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text("def test_one(): pass\n")
    (tmp_path / "longest.txt").write_text("")
    assert run(tmp_path)[-1] == "No test was skipped."


def test_the_table_is_made_of_what_pytest_prints() -> None:
    page = "tests/docs/test_commands.py::test_every_command_runs"
    log = [
        "===== slowest durations =====",
        "12.50s setup    tests/unit/a/test_x.py::test_one[a b]",
        "7.50s call     tests/unit/a/test_x.py::test_two",
        "40.00s call     tests/unit/a/test_y.py::test_one",
        "14.00s call     tests/unit/a/test_z.py::test_one",
        f"31.00s call     {page}[docs/x.md]",
        f"16.00s call     {page}[docs/y.md]",
    ]
    assert table(log).splitlines() == [
        "  40 tests/unit/a/test_y.py",
        f"  31 {page}[docs/x.md]",
        "  20 tests/unit/a/test_x.py",
        f"  16 {page}[docs/y.md]",
    ]
