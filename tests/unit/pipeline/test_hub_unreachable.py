"""Without a network: one sentence, at once, and none of the libraries' lines."""

from __future__ import annotations

import os
import re
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
from muster.pipeline.engines.answers import load
load(EngineSpec(model="Qwen/Qwen2.5-0.5B"), "cpu")
"""
JOINED = """
from muster_recipes.reasoning.config import ReasoningConfig
from muster_recipes.reasoning.sources import source_of
next(source_of(ReasoningConfig(dataset="math")).records)
"""
SSVAE = """
from muster_recipes.ssvae.dataset import hub_rows
hub_rows("mnist")
"""
ENCODER = """
from muster_recipes.embed.encoder import Encoder
Encoder("a/b", "cpu", pooling="mean", normalize=True, max_length=8, dtype="auto")
"""
FORCED = """
from muster_recipes.reasoning.config import ReasoningConfig
from muster_recipes.reasoning.hub import refresh
refresh(ReasoningConfig({}))
"""
QUIET = """
from muster_recipes.reasoning.host import Host, prepare
prepare(Host(no_warnings=True), "cpu")
import huggingface_hub.utils._http as http
http.logger.warning("Retrying in 1s")
raise SystemExit("ended")
"""


#: What each says.
REFUSED = {
    DATA: "SetupError: Cannot reach the hub for hf:openai/gsm8k",
    MODEL: "SetupError: The model 'Qwen/Qwen2.5-0.5B' cannot be loaded",
    JOINED: "SetupError: Cannot load EleutherAI/hendrycks_math (algebra, train)",
    SSVAE: "SetupError: Cannot fetch the data set ylecun/mnist",
    ENCODER: "SetupError: Cannot load the encoder a/b",
    FORCED.format("dataset='math'"): (
        "SetupError: Cannot fetch the data set EleutherAI/hendrycks_math: the Hugging Face "
        "hub cannot be reached."
    ),
    FORCED.format("model='a/b'"): (
        "SetupError: Cannot fetch the model a/b: the Hugging Face hub cannot be reached."
    ),
}
#: Imports once what the libraries of the hub are made of, and not these, which read the environment
#: then; runs each code in a fork of itself, with a file for what it says.
FORKS = """
import os, sys
import aiohttp, httpx, pandas, pyarrow.dataset, torch

for place in sys.argv[1:]:
    if not (pid := os.fork()):
        out = os.open(f"{place}.out", os.O_WRONLY | os.O_CREAT)
        os.dup2(out, 1), os.dup2(out, 2)
        os.environ["HF_HOME"] = f"{place}.home"
        exec(open(place).read())
        sys.exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    open(f"{place}.code", "w").write(str(code))
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each code says before it ends with an error."""
    place = tmp_path_factory.mktemp("hub")
    codes = {str(place / f"{n}.py"): code for n, code in enumerate(REFUSED)}
    for path, code in codes.items():
        Path(path).write_text(code)
    # Nothing listens at port 1.
    hub = {"HF_ENDPOINT": "http://127.0.0.1:1", "HF_HOME": str(place), "HF_HUB_OFFLINE": "0"}
    subprocess.run(
        [sys.executable, "-c", FORKS, *codes], env={**os.environ, **hub}, timeout=300, check=True
    )
    assert {Path(f"{path}.code").read_text() for path in codes} == {"1"}
    return {code: Path(f"{path}.out").read_text() for path, code in codes.items()}


@pytest.mark.thorough
@pytest.mark.skipif(not hasattr(os, "fork"), reason="all of them are forked")
@pytest.mark.parametrize("code", REFUSED)
def test_what_is_not_in_the_cache_is_refused_at_once(code: str, told: dict[str, str]) -> None:
    assert REFUSED[code] in told[code]
    assert "Retrying" not in told[code]


def test_no_warnings_holds_for_what_the_hub_library_logs() -> None:
    done = subprocess.run(
        [sys.executable, "-c", QUIET], capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stdout + done.stderr) == (1, "ended\n")


def test_everything_that_asks_the_hub_looks_first_whether_it_is_there() -> None:
    source = Path(__file__).parents[3] / "src"
    asks = re.compile(r"\.(load_dataset(_builder)?|snapshot_download|from_pretrained)\(")
    found = {
        path.relative_to(source).as_posix(): path.read_text()
        for path in source.rglob("*.py")
        if asks.search(path.read_text()) and "local_files_only=True" not in path.read_text()
    }
    assert len(found) >= 6
    looks = ("use_cache_if_unreachable()", "is_hub_reachable()")
    assert [name for name, text in found.items() if not any(call in text for call in looks)] == []
