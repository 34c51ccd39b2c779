"""Programs written for torchrun with other libraries run unchanged under `muster run`."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from tests.conftest import MusterCli

PEERS = Path(__file__).parent / "peers"
NEEDS = {"accelerate": "accelerate", "lightning": "lightning", "transformers": "transformers"}


@pytest.mark.parametrize(
    ("script", "name", "start"),
    [
        # As exec: test_a_plain_ddp_script_runs_unchanged.
        ("plain_script.py", "plain", "fork"),
        ("accelerate_script.py", "accelerate", "exec"),
        ("lightning_script.py", "lightning", "exec"),
        ("hf_trainer_script.py", "transformers", "exec"),
    ],
)
def test_a_script_of_another_library_runs_unchanged(
    muster_cli: MusterCli, script: str, name: str, start: str
) -> None:
    needed = NEEDS.get(name)
    if needed is not None and importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed: pip install {needed}")
    done = muster_cli(
        "run", "--devices", "cpu:2", "--all-ranks", "--start", start, "--run-dir", "runs/peer",
        str(PEERS / script), *(["out"] if name == "transformers" else []),
        timeout_s=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    lines = done.stdout.splitlines()
    assert f"[0] {name}: rank 0 of 2" in lines
    assert f"[1] {name}: rank 1 of 2" in lines
