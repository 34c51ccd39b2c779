"""An extra that is not installed: one sentence, one hint that names the extra, exit code 3."""

from __future__ import annotations

import importlib
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from muster.base.errors import MissingPackageError, SetupError
from muster.farm.executors import ray
from muster.gang.handle import OLDEST_TORCH, start_supervisor
from muster.pipeline.engines.answers import check as check_loading
from muster.pipeline.engines.engine import EngineSpec
from muster.pipeline.engines.remote import OpenAiEngine
from muster.pipeline.engines.vllm_offline import VllmEngine
from muster.pipeline.sources import files, hub
from muster.slurm import script
from muster_recipes.har import nets
from muster_recipes.reasoning.referee import Referee


def gymnasium() -> object:
    sys.modules.pop("muster.rl.gymnasium_spaces", None)
    return importlib.import_module("muster.rl.gymnasium_spaces")


EXTRAS = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"][
    "optional-dependencies"
]

#: package → (its name for import, extra, what needs it)
CASES: dict[str, tuple[str, str, Callable[[], object]]] = {
    "vllm": ("vllm", "vllm", lambda: VllmEngine(EngineSpec(model="m"))),
    "aiohttp": ("aiohttp", "openai", lambda: OpenAiEngine(EngineSpec(base_url="http://x"))),
    "transformers": ("transformers", "transformers", lambda: check_loading(EngineSpec(model="m"))),
    "bitsandbytes": (
        "bitsandbytes",
        "quantize",
        lambda: check_loading(EngineSpec(model="m", quantize="8bit")),
    ),
    "zstandard": ("zstandard", "zstd", files._zstd_copier),
    "datasets": ("datasets", "datasets", lambda: hub._load("name", None)),  # type: ignore[arg-type]
    "ray": ("ray", "ray", ray._import_ray),
    "submitit": ("submitit", "slurm", script._submitit),
    "gymnasium": ("gymnasium", "rl", gymnasium),
    "math-verify": ("math_verify", "reasoning", Referee.check_installed),
    "vit": ("transformers", "transformers", lambda: nets._load(Path("x"))),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_missing_is_said_in_one_way(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, extra, use = CASES[name]
    package = "transformers" if name == "vit" else name
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingPackageError) as found:
        use()
    text = str(found.value)
    assert f" needs the package {package}, which is not installed.\n" in text
    assert text.count("Hint: ") == 1 and f"Hint: pip install 'muster-gpu[{extra}]'" in text
    assert found.value.exit_code == 3
    assert any(line.startswith(package) for line in EXTRAS[extra])


def test_a_clone_that_is_not_installed_is_named() -> None:
    """Run by PYTHONPATH there is nothing that pip knows as muster-gpu."""
    clone = Path(__file__).parents[3]
    code = "from muster.base.errors import how_to_install as how; print(how('torch'))"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        cwd=clone / "src", env={}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert shlex.split(done.stdout) == ["pip", "install", "-e", f"{clone}[torch]"]


def test_ranks_are_not_started_with_a_torch_that_is_too_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was started, and its ranks met a TypeError later."""
    assert f"torch>={OLDEST_TORCH[0]}.{OLDEST_TORCH[1]}" in EXTRAS["torch"]
    place = tmp_path / "torch-2.6.0.dist-info"
    place.mkdir()
    (place / "METADATA").write_text("Name: torch\nVersion: 2.6.0+cpu\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SetupError, match=r"needs torch 2\.7 or newer, and torch 2\.6\.0\+cpu is"):
        start_supervisor()
