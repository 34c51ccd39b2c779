"""Programs written for torchrun with other libraries run unchanged under `muster run`."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from tests.conftest import MusterCli

GALLERY = Path(__file__).parents[2] / "examples" / "gallery"


@pytest.mark.parametrize(
    ("script", "name"),
    [
        ("accelerate_loop.py", "accelerate"),
        ("lightning_module.py", "lightning"),
        ("hf_trainer.py", "transformers"),
    ],
)
def test_a_script_of_another_library_runs_unchanged(
    muster_cli: MusterCli, tmp_path: Path, script: str, name: str
) -> None:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed: pip install {name}")
    done = muster_cli(
        "run", "--devices", "cpu:2", "--all-ranks", "--run-dir", "runs/peer",
        str(GALLERY / script), *(["out"] if name == "transformers" else []),
        timeout_s=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    lines = done.stdout.splitlines()
    assert f"[0] {name}: rank 0 of 2" in lines
    assert f"[1] {name}: rank 1 of 2" in lines
    text = (tmp_path / "runs/peer/metrics.jsonl").read_text()
    losses = [json.loads(line)["loss"] for line in text.splitlines()]
    assert sum(losses[-5:]) < sum(losses[:5])
