"""No output of any command is ended by an encoding that lacks its signs (LANG=C)."""

from __future__ import annotations

import doctest
import io
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.made_runs import made_sweep

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


def test_a_word_that_names_nothing_is_repeated_by_its_signs(poor: Callable[..., str]) -> None:
    """It was said by its bytes: 'n\\udcc3\\udcb6'."""
    word = os.fsencode("nö").decode("ascii", "surrogateescape")
    assert r"Unknown run 'n\xf6'" in poor("status", word)


def test_a_plan_and_a_table(poor: Callable[..., str]) -> None:
    shown = poor("plan", "params=7e9", "--device", "a100-80gb", "--devices", "8")
    assert "\n" in shown
    with streams.steady(is_vital=False):
        table(["a·b"], [["→ é"]])
    assert sys.stdout.buffer.getvalue().split() == [b"a-b", b"->", rb"\xe9"]  # type: ignore


#: Standard output and error as Python opens them: for LANG=C, for a locale of Latin-1, and usually.
STREAMS = {
    "ascii": ("surrogateescape", "backslashreplace"),
    "latin-1": ("strict", "backslashreplace"),
    "utf-8": ("strict", "backslashreplace"),
}
#: A name as it is, and as Python reads it where it takes all names for ASCII.
NAMES = {"known": "läuf-😀", "unknown": os.fsencode("läuf-😀").decode("ascii", "surrogateescape")}
LOOKS = {
    "list": 0, "list --json": 0, "status RUN": 0, "status RUN --json": 0, "queue": 0,
    "why RUN": 0, "errors RUN": 0, "attach RUN": 1, "logs RUN 1": 0,
    "export RUN --to läuf-😀.csv": 0, "best RUN": 2, "status nö-😀": 2,
}  # fmt: skip


@pytest.mark.parametrize("kind", NAMES)
def test_names_are_readable_in_every_encoding(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an encoding lacks is written out as the sign that it is, not as the bytes of a name."""
    name = NAMES[kind]
    monkeypatch.chdir(tmp_path)
    made_sweep(Path("runs", name), 2)
    for encoding, errors in STREAMS.items():
        for words, code in LOOKS.items():
            out, error = (io.TextIOWrapper(io.BytesIO(), encoding, errors=how) for how in errors)
            monkeypatch.setattr(sys, "stdout", out)
            monkeypatch.setattr(sys, "stderr", error)
            argv = [word.replace("RUN", f"runs/{name}") for word in words.split()]
            assert main(argv) == code, words
            written = b""
            for stream in (out, error):
                stream.flush()
                written += stream.buffer.getvalue()  # type: ignore[attr-defined]
            shown = written.decode("utf-8" if encoding == "ascii" else encoding)  # bytes of names
            if "--json" in words:
                found = json.loads(shown)
                found = found[0] if isinstance(found, list) else found
                assert os.fsencode(found["name"]) == os.fsencode(name)
            else:
                assert not re.search(r"\\udc|\\u20|\ufffd", shown), (encoding, words, shown)
