"""The output is never a file that is read, by whatever name."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

STAGE = "def same(record):\n    return record\n"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "stage.py").write_text(STAGE)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "in.jsonl").write_text('{"n": 1}\n')
    return tmp_path


def same(path: Path) -> None:
    return


def hard_link(path: Path) -> None:
    os.link("data/in.jsonl", path)


def symbolic_link(path: Path) -> None:
    path.symlink_to(Path("data/in.jsonl").absolute())


def link_to_folder(path: Path) -> None:
    path.symlink_to(Path("data").absolute())


@pytest.mark.parametrize("source", ["data/in.jsonl", "data", "data/*.jsonl", "link.jsonl"])
@pytest.mark.parametrize(
    ("output", "make"),
    [
        ("data/in.jsonl", same),
        ("./data/../data/in.jsonl", same),
        ("other.jsonl", hard_link),
        ("other.jsonl", symbolic_link),
        ("data/", same),
        ("here", link_to_folder),
    ],
)
@pytest.mark.parametrize("more", [[], ["--restart"]])
def test_an_input_is_never_the_output(
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    muster_main: Callable[..., CompletedProcess[str]],
    source: str,
    output: str,
    make: Callable[[Path], None],
    more: list[str],
) -> None:
    monkeypatch.chdir(place)
    make(Path(output))
    Path("link.jsonl").symlink_to("data/in.jsonl")
    words = ["stage.py:same", "--input", source, "--output", output, "--overwrite", *more]
    for last in ([], ["--dry-run"]):
        done = muster_main("map", *words, *last)
        assert done.returncode == 2
        assert "would be replaced by what is made of it" in done.stderr
    assert (place / "data" / "in.jsonl").read_text() == '{"n": 1}\n'
    assert not (place / "runs").exists()
