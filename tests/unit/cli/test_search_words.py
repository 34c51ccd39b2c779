"""What a search on the command line refuses, in a sentence, before anything is started."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from muster import Space, UsageError, sweep

Main = Callable[..., CompletedProcess[str]]
SPACE = ("--space", "lr=log(1e-5,1)")
GOAL = ("--minimize", "loss")


@pytest.fixture(autouse=True)
def _target(tmp_path: Path) -> None:
    (tmp_path / "f.py").write_text(
        "import muster\n\ndef f(lr: float, n: int = 3, seed: int = 0):\n    return {'loss': lr}\n\n"
        "@muster.batched(max_batch=8)\ndef many(items):\n    return [1.0 for _ in items]\n"
    )


REFUSED = {
    "without a search": (["f.py:f", "--trials", "3"], "--trials has no effect without a search"),
    "no space": (["f.py:f", *GOAL, "--trials", "3"], "The search has no space"),
    "no goal": (["f.py:f", *SPACE, "--trials", "3"], "The search has no goal"),
    "no end": (["f.py:f", *SPACE, *GOAL], "The search has no end"),
    "no price": (
        ["f.py:f", *SPACE, *GOAL, "--max-cost", "3"],
        "--max-cost and --price-per-gpu-hour need each other",
    ),
    "a price only": (
        ["f.py:f", *SPACE, *GOAL, "--price-per-gpu-hour", "3"],
        "need each other",
    ),
    "a price for auto": (
        [
            *("f.py:f", *SPACE, *GOAL, "--max-cost", "3", "--price-per-gpu-hour", "3"),
            "--per-gpu",
            "auto",
        ],
        "how many workers share a GPU",
    ),
    "a grid too": (["f.py:f", *SPACE, *GOAL, "--grid", "n=1,2"], "--grid and a search are both"),
    "parts": (["f.py:f", *SPACE, *GOAL, "--trials", "3", "--part", "0/2"], "chooses its tasks"),
    "unknown name": (["f.py:f", "--space", "q=int(1,3)", *GOAL], "Unknown parameter 'q'"),
    "missing name": (["f.py:f", "--space", "n=int(1,3)", *GOAL], "lr"),
    "batched": (["f.py:many", "--space", "n=int(1,3)", *GOAL], "is batched"),
    "a population of nobody knows how many": (
        ["f.py:f", *SPACE, *GOAL, "--search-time", "1h", "--stop", "pbt:max=9"],
        "size of its population",
    ),
    "a population of trainings": (
        [*SPACE, *GOAL, *"--trials=3 --stop=pbt:max=9 -- muster train x --lr={lr}".split()],
        "goes on only with the settings that it began with",
    ),
    "inline": (
        ["f.py:f", *SPACE, *GOAL, "--trials", "3", "--stop", "asha", "--on", "inline"],
        "--stop has no effect with --on inline",
    ),
    "bad guess": (["f.py:f", *SPACE, *GOAL, "--trials", "3", "--try", "lr"], "is not NAME=VALUE"),
    "a recipe": (["ssm", *SPACE, *GOAL], "--space"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_meaning_is_refused(case: str, muster_main: Main, tmp_path: Path) -> None:
    words, sentence = REFUSED[case]
    done = muster_main("sweep", *words, "--devices", "cpu:1", "--dry-run")
    assert done.returncode == 2, done
    assert sentence in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_program_has_names_of_its_own(muster_main: Main, tmp_path: Path) -> None:
    space = ["--space", "model.lr=log(1e-4,1e-1)", "--trials", "3"]
    program = ["--", "python", "app.py", "model.lr={model.lr}"]
    done = muster_main("sweep", *space, *GOAL, "--devices", "cpu:1", "--dry-run", *program)
    assert done.returncode == 0, done
    assert "a setting of the space: model.lr=" in done.stdout


def test_a_dry_run_says_what_would_be_tried(muster_main: Main, tmp_path: Path) -> None:
    words = ["f.py:f", *SPACE, *GOAL, "--trials", "20", "--seeds", "3", "--stop", "asha"]
    done = muster_main("sweep", *words, "--devices", "cpu:1", "--dry-run")
    assert done.returncode == 0, done
    assert "20 trials, 3 seeds each: minimize loss, sampler random, asha" in done.stdout
    assert "a setting of the space: lr=" in done.stdout
    words = ["f.py:f", *SPACE, *GOAL, "--max-cost", "40", "--price-per-gpu-hour", "2.5"]
    done = muster_main("sweep", *words, "--devices", "cpu:1", "--dry-run")
    assert "search   a cost of 40, at 2.5 a GPU hour: minimize loss" in done.stdout


def test_calls_refuse_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    space = {"lr": Space.log(1e-5, 1.0)}
    with pytest.raises(UsageError, match="grid, zipped, rows and config"):
        sweep("f.py:f", space=space, minimize="loss", trials=3, grid={"n": [1]})
    with pytest.raises(UsageError, match="has no effect without a search"):
        sweep("f.py:f", grid={"lr": [1]}, trials=3)
