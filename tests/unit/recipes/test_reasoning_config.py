"""The flags of the recipe: refused when they cannot be meant, and with the effects they promise."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from muster import UsageError
from muster.pipeline.engines.engine import EngineSpec
from muster_recipes.reasoning.config import ARITH_MODEL, HUB_MODEL, ReasoningConfig
from muster_recipes.reasoning.host import Host, fitted, prepare, say_once
from muster_recipes.reasoning.hub import refresh
from muster_recipes.reasoning.recipe import RECIPE, remarks, stages


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_problems": 0}, "--num-problems 0 is too small"),
        ({"max_tokens": 0}, "--max-tokens 0 is too small"),
        ({"batch_size": -4}, "--batch-size -4 is below 0"),
        ({"max_iterations": -1}, "--max-iterations -1 is below 0"),
        ({"cleanup_delay": -1.0}, "--cleanup-delay -1.0 is below 0"),
        ({"temperature": 2.5}, "--temperature 2.5 is not from 0"),
        ({"eval_temperature": -0.1}, "--eval-temperature -0.1"),
        ({"temperature": float("nan")}, "--temperature nan"),
        ({"top_p": 0.0}, "--top-p 0.0"),
        ({"quality_threshold": 1.1}, "--quality-threshold 1.1"),
        ({"engine": "openai", "model": "m"}, "needs the address of a server"),
        ({"engine": "openai", "base_url": "http://x"}, "needs the model's name on the server"),
        ({"base_url": "http://x"}, "--base-url http://x has no effect with --engine transformers"),
        ({"engine": "vllm", "quantize": "8bit"}, "--quantize 8bit has no effect"),
        ({"tensor_parallel": 2}, "--tensor-parallel 2 has no effect"),
        ({"concurrency": 8}, "--concurrency 8 has no effect with --engine transformers"),
        ({"engine": "vllm", "compile": True}, "--compile has no effect with --engine vllm"),
        ({"engine": "vllm", "batch_size": 8}, "it is for --engine transformers"),
        ({"engine": "openai", "base_url": "x", "model": "m", "dtype": "float16"},
         "--dtype float16 has no effect with --engine openai.\nHint: leave it out; it is for "
         "--engine transformers and vllm"),
        ({"tensor_parallel": 0}, "--tensor-parallel 0 is below 1"),
    ],
)  # fmt: skip
def test_flags_that_cannot_be_meant_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ReasoningConfig(**values).check()


def test_the_stages_of_the_specification() -> None:
    config = ReasoningConfig(dataset="gsm8k", model="m", seed=3, batch_size=4)
    config.check()
    read, generate, evaluate, improve, finish = stages(config)
    assert read.layout == "gsm8k"
    sampling = generate.sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.6, 0.95, 4096)
    assert improve.sampling == sampling
    assert evaluate.sampling == improve.eval_sampling
    assert evaluate.sampling.temperature == 0.3
    assert (improve.quality_threshold, improve.max_iterations) == (0.8, 2)
    assert evaluate.grading == improve.grading == "model"
    assert generate.engine == evaluate.engine == improve.engine, "so that they share one"
    assert generate.engine.batch_size == 4
    assert {generate.seed, evaluate.seed, improve.seed} == {3}
    assert finish.keep == "all"


def test_no_rounds_need_no_stage() -> None:
    names = [type(stage).__name__ for stage in stages(ReasoningConfig(max_iterations=0))]
    assert names == ["Read", "Generate", "Evaluate", "Finish"]


def test_the_recipe_answers_questions_without_running() -> None:
    assert RECIPE.inform(ReasoningConfig()) is None
    listed = RECIPE.inform(ReasoningConfig(list_datasets=True))
    assert listed is not None and "gsm8k" in [row["key"] for row in listed]
    one = RECIPE.inform(ReasoningConfig(dataset_info="aqua"))
    assert one is not None and one[0]["source"] == "hf:deepmind/aqua_rat"


def test_the_recipe_reads_what_the_flags_say() -> None:
    assert RECIPE.source(ReasoningConfig(dataset="asdiv")) == (
        "hf:EleutherAI/asdiv", None, "validation",
    )  # fmt: skip
    assert RECIPE.source(ReasoningConfig(dataset="a.csv")) == ("a.csv", None, None)
    assert len(list(RECIPE.source(ReasoningConfig(num_problems=3)))) == 3


def test_the_recipe_sums_up_and_draws(tmp_path: Path) -> None:
    row: dict[str, Any] = {
        "reasoning": "", "thinking": "", "answer": "7", "verification": "correct", "quality": 0.9,
        "scores": None, "ungraded": False, "iterations": 0,
        "tokens": {"prompt": 1, "completion": 2},
    }  # fmt: skip
    rows = [{**row, "versions": [row]}]
    assert RECIPE.summarise is not None and RECIPE.draw is not None
    assert RECIPE.summarise(ReasoningConfig(quality_threshold=0.95), rows)["accepted"] == 0
    assert RECIPE.summarise(ReasoningConfig(), iter(rows))["accepted"] == 1
    assert RECIPE.draw(ReasoningConfig(), iter(rows), tmp_path) == [tmp_path / "scores.png"]


def test_low_memory_starts_small_unless_told_otherwise() -> None:
    low = ReasoningConfig(low_memory=True)
    assert low.engine_spec.batch_size == 1
    assert low.sampling.max_tokens == 2048
    told = ReasoningConfig(low_memory=True, batch_size=2, max_tokens=4096)
    assert told.engine_spec.batch_size == 2
    assert told.sampling.max_tokens == 4096


def test_low_memory_takes_8_bits_only_where_they_work(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "muster")
    say_once.cache_clear()
    spec, low = EngineSpec(model="m"), Host(low_memory=True)
    assert fitted(spec, Host(), "cuda:0") == spec
    assert fitted(spec, low, "cpu") == spec
    assert "8 bits need a CUDA device" in caplog.text
    four = EngineSpec(model="m", quantize="4bit")
    assert fitted(four, low, "cuda:0") == four, "what was asked for stays"


def test_the_model_that_is_used_is_named() -> None:
    assert ReasoningConfig().model_name == str(ARITH_MODEL)
    assert not ReasoningConfig().is_graded
    assert ReasoningConfig(grading="model").is_graded
    config = ReasoningConfig(dataset="numina_math", cleanup_delay=2.0)
    config.check()
    assert config.model_name == HUB_MODEL
    assert config.is_graded
    assert remarks(config) == [
        "Model: Qwen/Qwen2.5-1.5B-Instruct, because --model names none.",
        "--cleanup-delay 2 does nothing: sleeping frees no memory.",
    ]
    fast = remarks(ReasoningConfig(model="m", grading="model", optimize_gpu=True))
    assert len(fast) == 2 and fast[0].startswith("On CUDA workers TF32 is on")
    assert "ships with muster" in remarks(ReasoningConfig())[0]
    assert remarks(ReasoningConfig(model="m", grading="model")) == []


def test_optimize_gpu_says_what_it_cannot_set(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "muster")
    say_once.cache_clear()
    [line] = prepare(Host(optimize_gpu=True), "cpu")
    assert prepare(Host(optimize_gpu=True), "cpu") == [line]
    assert caplog.messages == [line], "once for all stages"
    assert "sets nothing on cpu" in line


def test_optimize_gpu_sets_tf32_and_tuning() -> None:
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
    assert before == ("highest", False)
    try:
        assert len(prepare(Host(optimize_gpu=True), "cuda:0")) == 2
        assert torch.get_float32_matmul_precision() == "high"
        assert torch.backends.cudnn.benchmark
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.benchmark = before[1]


def test_no_warnings_quiets_others_and_not_muster(tmp_path: Path) -> None:
    for name in ("theirs", "muster_recipes_of_ours", "musterlike"):
        (tmp_path / f"{name}.py").write_text(
            f"import warnings\ndef speak():\n    warnings.warn('{name} warns', stacklevel=1)\n"
        )
    done = _python(
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import logging, warnings, theirs, muster_recipes_of_ours, musterlike\n"
        "from muster_recipes.reasoning.host import Host, prepare\n"
        "import io, contextlib; heard = io.StringIO()\n"
        "logging.basicConfig(stream=heard)\n"
        "prepare(Host(no_warnings=True), 'cpu')\n"
        "with contextlib.redirect_stderr(heard):\n"
        "    theirs.speak(); musterlike.speak(); muster_recipes_of_ours.speak()\n"
        "    logging.getLogger('transformers.x').warning('they log')\n"
        "    logging.getLogger('transformers.x').error('they fail')\n"
        "    logging.getLogger('muster').warning('we log')\n"
        "print(heard.getvalue())\n"
    )
    assert "theirs warns" not in done
    assert "musterlike warns" not in done
    assert "muster_recipes_of_ours warns" in done
    assert "they log" not in done
    assert "they fail" in done
    assert "we log" in done


def test_force_download_says_what_there_is_not_to_fetch() -> None:
    data, model = refresh(ReasoningConfig())
    assert data == "Nothing to fetch for the data set arith: it is on this machine."
    assert model.endswith("it is a folder on this machine.")
    config = ReasoningConfig(engine="openai", model="m", base_url="http://x", dataset="a.csv")
    assert refresh(config)[1] == "Nothing to fetch for the model m: the server has it."


def test_force_download_renews_the_cache(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "train.jsonl").write_text('{"problem": "3+4", "answer": "7"}\n')
    code = (
        "import pathlib, datasets\n"
        "from muster_recipes.reasoning.config import ReasoningConfig\n"
        "from muster_recipes.reasoning.hub import refresh\n"
        f"config = ReasoningConfig(dataset='hf:{data}', model='.')\n"
        f"root = pathlib.Path({str(tmp_path)!r})\n"
        "def files(): return [p.stat().st_ino for p in root.rglob('*.arrow')]\n"
        f"datasets.load_dataset({str(data)!r}); first = files()\n"
        f"datasets.load_dataset({str(data)!r}); print(files() == first)\n"
        "print(refresh(config)[0]); print(files() != first, len(first))\n"
    )
    done = _python(code, HF_HOME=str(tmp_path / "cache"), HF_HUB_OFFLINE="1")
    assert done.splitlines() == ["True", f"Fetched the data set {data} again.", "True 1"]


@pytest.mark.parametrize(
    ("flags", "what"),
    [("dataset='someone/nothing'", "data set someone/nothing"), ("model='a/b'", "model a/b")],
)
def test_a_hub_that_cannot_be_reached_is_a_setup_error(
    tmp_path: Path, flags: str, what: str
) -> None:
    done = _python(
        "from muster.base.errors import SetupError\n"
        "from muster_recipes.reasoning.config import ReasoningConfig\n"
        "from muster_recipes.reasoning.hub import refresh\n"
        "try:\n"
        f"    refresh(ReasoningConfig({flags}))\n"
        "except SetupError as error:\n"
        "    print(error)\n",
        HF_HOME=str(tmp_path),
        HF_HUB_OFFLINE="1",
    )
    assert done.startswith(f"Cannot fetch the {what}: ")
    assert "\nHint: check the n" in done


def _python(code: str, **variables: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **variables},
    ).stdout
