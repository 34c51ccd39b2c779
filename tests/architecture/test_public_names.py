from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import muster
from muster.cli.main import COMMANDS

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference" / "cli.md"


def test_the_public_face_is_small_sorted_and_documented() -> None:
    assert muster.__all__ == sorted(muster.__all__)
    # The errors are one tree, shown in one row; a user catches what a call says that it raises.
    errors = [name for name in muster.__all__ if name.endswith("Error")]
    assert len(muster.__all__) - len(errors) <= 20
    pages = "\n".join(path.read_text() for path in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")])
    for name in muster.__all__:
        assert getattr(muster, name).__doc__, name
        assert name in pages, f"no page mentions muster.{name}"
    assert set(muster.__all__) <= set(dir(muster))


@pytest.mark.parametrize("call", ["sweep", "fit"])
def test_what_a_call_says_that_it_raises_is_public(call: str) -> None:
    said = set(re.findall(r"\b\w+Error\b", getattr(muster, call).__doc__))
    assert said and said <= set(muster.__all__)


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_is_in_the_reference(command: str) -> None:
    assert f"## muster {command}\n" in REFERENCE.read_text()


def test_the_reference_is_what_the_help_says() -> None:
    """A snapshot: adding a flag is a deliberate act. Renew: python docs/generate_reference.py"""
    script = ROOT / "docs" / "generate_reference.py"
    done = subprocess.run(
        [sys.executable, script, "--stdout"], capture_output=True, text=True, check=True
    )
    files = ("cli.md", "files.md", "experiment.schema.json")
    assert done.stdout == "".join((REFERENCE.parent / file).read_text() for file in files)
