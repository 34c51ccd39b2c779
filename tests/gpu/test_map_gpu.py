"""A map whose stage fills a CUDA device."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.conftest import MusterCli
from tests.programs import read_program

pytestmark = pytest.mark.gpu


def test_a_batch_without_memory_is_made_smaller(tmp_path: Path, muster_cli: MusterCli) -> None:
    (tmp_path / "gpu_tasks.py").write_text(read_program("gpu_tasks.py"))
    (tmp_path / "in.jsonl").write_text("".join(f'{{"x": {x}}}\n' for x in range(16)))
    words = ["--input", "in.jsonl", "--output", "out.jsonl", "--batch-size", "16"]
    done = muster_cli("map", "gpu_tasks.py:Hungry", *words, "--devices", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 16
