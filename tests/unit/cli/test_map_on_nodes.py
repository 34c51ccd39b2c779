"""A map on several nodes: flags of a training are refused with what to use instead, which works."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

STAGE = """
from dataclasses import dataclass

def same(record):
    return record

@dataclass
class Ranked:
    node_rank: int = 0

    def process(self, batch):
        return [{**record, "node_rank": self.node_rank} for record in batch]
"""
Cli = Callable[..., CompletedProcess[str]]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "stage.py").write_text(STAGE)
    (tmp_path / "in.jsonl").write_text("".join(f'{{"n": {n}}}\n' for n in range(10)))
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        ["--num-nodes", "2"],
        ["--num_nodes=2", "--node-rank", "1"],
        ["--nnodes", "2", "--master-addr", "a", "--master-port", "1"],
        ["--nodes", "2"],
    ],
)
@pytest.mark.parametrize("pipeline", ["stage.py:same", "reasoning"])
def test_flags_of_nodes_are_refused_with_what_to_use(
    place: Path, muster_main: Cli, words: list[str], pipeline: str
) -> None:
    done = muster_main("map", pipeline, "--input", "in.jsonl", "--output", "o.jsonl", *words)
    assert done.returncode == 2
    assert words[0].partition("=")[0].replace("_", "-") in done.stderr
    assert "--on slurm or --on ray" in done.stderr
    assert "--skip and --limit" in done.stderr
    assert not (place / "runs").exists()


def test_a_stage_may_have_such_a_flag_of_its_own(place: Path, muster_main: Cli) -> None:
    words = ["map", "stage.py:Ranked", "--input", "in.jsonl", "--output", "o.jsonl"]
    done = muster_main(*words, "--node-rank", "3", "--on", "inline")
    assert done.returncode == 0, done.stderr
    assert '"node_rank":3' in (place / "o.jsonl").read_text()


def test_parts_by_hand_joined_end_to_end_are_the_whole(place: Path, muster_main: Cli) -> None:
    words = ["map", "stage.py:same", "--input", "in.jsonl", "--on", "inline"]
    assert muster_main(*words, "--output", "whole.jsonl").returncode == 0
    for rank in range(2):
        part = ["--skip", str(5 * rank), "--limit", "5", "--output", f"part{rank}.jsonl"]
        assert muster_main(*words, *part).returncode == 0
    joined = "".join((place / f"part{rank}.jsonl").read_text() for rank in range(2))
    assert joined == (place / "whole.jsonl").read_text()
