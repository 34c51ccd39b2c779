"""Checkpoints of ranks that see one folder and do not know it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
from pathlib import Path

import torch.distributed as dist
from muster.rank.checkpoint_travel import gather_parts

rank, place = int(sys.argv[1]), Path(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{place}/meet", rank=rank, world_size=2)
gather_parts(place / "step", dist.group.WORLD, rank, sees=rank == 0)
"""


@pytest.mark.thorough
def test_a_part_that_is_there_already_is_not_lost(tmp_path: Path) -> None:
    (tmp_path / "step").mkdir()
    part = tmp_path / "step" / "__1_0.distcp"
    part.write_bytes(b"x" * 100_000)
    (tmp_path / "program.py").write_text(PROGRAM)
    ranks = [
        subprocess.Popen([sys.executable, tmp_path / "program.py", str(rank), str(tmp_path)])
        for rank in (0, 1)
    ]
    assert [rank.wait(120) for rank in ranks] == [0, 0]
    assert part.read_bytes() == b"x" * 100_000
    assert [path.name for path in part.parent.iterdir()] == [part.name]
