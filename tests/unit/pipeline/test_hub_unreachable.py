"""Without a network: one sentence, at once, and none of the libraries' lines."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

DATA = """
from muster.pipeline.sources.hub import InputOptions, arrow_files
arrow_files("openai/gsm8k", InputOptions(config="main", split="test"))
"""
MODEL = """
from muster.generation import EngineSpec
from muster.pipeline.engines.loading import load
load(EngineSpec(model="Qwen/Qwen2.5-0.5B"), "cpu")
"""
QUIET = """
from muster_recipes.reasoning.host import Host, prepare
prepare(Host(no_warnings=True), "cpu")
import huggingface_hub.utils._http as http
http.logger.warning("Retrying in 1s")
raise SystemExit("ended")
"""


def run(code: str, tmp_path: Path) -> str:
    # Nothing listens at port 1.
    place = {"HF_ENDPOINT": "http://127.0.0.1:1", "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **place}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    return done.stdout + done.stderr


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("code", "says"),
    [
        (DATA, "SetupError: Cannot reach the hub for hf:openai/gsm8k"),
        (MODEL, "SetupError: The model 'Qwen/Qwen2.5-0.5B' cannot be loaded"),
    ],
)
def test_what_is_not_in_the_cache_is_refused_at_once(code: str, says: str, tmp_path: Path) -> None:
    told = run(code, tmp_path)
    assert says in told
    assert "Retrying" not in told


def test_no_warnings_holds_for_what_the_hub_library_logs(tmp_path: Path) -> None:
    assert run(QUIET, tmp_path).strip() == "ended"
