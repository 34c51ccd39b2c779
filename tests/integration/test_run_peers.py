"""Programs written for torchrun with other libraries run unchanged under `muster run`."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from tests.conftest import MusterCli

PEERS = Path(__file__).parent / "peers"
GALLERY = Path(__file__).parents[2] / "examples" / "gallery"
NEEDS = {"accelerate": "accelerate", "lightning": "lightning", "transformers": "transformers"}


@pytest.mark.parametrize(
    ("script", "name", "start"),
    [
        # As exec: test_a_plain_ddp_script_runs_unchanged.
        (PEERS / "plain_script.py", "plain", "fork"),
        (GALLERY / "accelerate_loop.py", "accelerate", "exec"),
        (GALLERY / "lightning_module.py", "lightning", "exec"),
        (GALLERY / "hf_trainer.py", "transformers", "exec"),
    ],
)
def test_a_script_of_another_library_runs_unchanged(
    muster_cli: MusterCli, tmp_path: Path, script: Path, name: str, start: str
) -> None:
    needed = NEEDS.get(name)
    if needed is not None and importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed: pip install {needed}")
    done = muster_cli(
        "run", "--devices", "cpu:2", "--all-ranks", "--start", start, "--run-dir", "runs/peer",
        str(script), *(["out"] if name == "transformers" else []),
        timeout_s=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    lines = done.stdout.splitlines()
    assert f"[0] {name}: rank 0 of 2" in lines
    assert f"[1] {name}: rank 1 of 2" in lines
    if script.parent == GALLERY:
        text = (tmp_path / "runs/peer/metrics.jsonl").read_text()
        losses = [json.loads(line)["loss"] for line in text.splitlines()]
        assert sum(losses[-5:]) < sum(losses[:5])
