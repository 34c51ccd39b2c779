"""No output of any command is ended by an encoding that lacks its signs (LANG=C)."""

from __future__ import annotations

import doctest
import io
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from muster.cli import streams
from muster.cli.main import COMMANDS, main
from muster.cli.output import table


def test_the_examples_in_the_module() -> None:
    assert doctest.testmod(streams).failed == 0


@pytest.fixture
def poor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., str]:
    """Runs a command whose two outputs take ASCII and nothing else; returns them."""

    def run(*args: str) -> str:
        out, error = (io.TextIOWrapper(io.BytesIO(), encoding="ascii") for _ in range(2))
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", error)
        monkeypatch.chdir(tmp_path)
        try:
            main(args)
        except SystemExit:
            pass
        written = b""
        for stream in (out, error):
            stream.flush()
            written += stream.buffer.getvalue()  # type: ignore[attr-defined]
        return written.decode("ascii")

    return run


@pytest.mark.parametrize("command", COMMANDS)
def test_every_help_and_every_complaint(poor: Callable[..., str], command: str) -> None:
    assert poor(command, "--help")
    assert poor(command, "--no-such-flag-é·→")


def test_a_plan_and_a_table(poor: Callable[..., str]) -> None:
    shown = poor("plan", "params=7e9", "--device", "a100-80gb", "--devices", "8")
    assert "\n" in shown
    with streams.steady(is_vital=False):
        table(["a·b"], [["→ é"]])
    assert sys.stdout.buffer.getvalue().split() == [b"a-b", b"->", rb"\xe9"]  # type: ignore
