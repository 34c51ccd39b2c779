"""Docs that cannot lie: every command shown is run, every link exists."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")])
FENCE = re.compile(
    r"(?P<marks>(?:<!--[^\n]*-->\n)*)```(?P<language>\w*)\n(?P<body>.*?)```", re.DOTALL
)
MARK = re.compile(r"<!-- (file|not run|exit): ?(.*?) -->")


@dataclass(frozen=True)
class Block:
    language: str
    body: str
    marks: dict[str, str]


def blocks(page: Path) -> list[Block]:
    return [
        Block(found["language"], found["body"], dict(MARK.findall(found["marks"])))
        for found in FENCE.finditer(page.read_text())
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_command_runs(page: Path, tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    for block in blocks(page):
        if "file" in block.marks:
            (tmp_path / block.marks["file"]).write_text(block.body)
        if block.language != "bash":
            continue
        if "not run" in block.marks:
            assert block.marks["not run"], "say why the block is not run"
            continue
        script = f"set -euo pipefail\n{block.body}"
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=200,
            check=False,
        )
        expected = int(block.marks.get("exit", "0"))
        assert done.returncode == expected, f"{block.body}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_exists(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#\s]+)", text):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target
