"""Recipes by name, by file and from packages; and ``--seeds``, which means one thing everywhere."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tests.conftest import MusterCli
from tests.programs import read_program

from muster.api.recipe import TrainRecipe
from muster.api.start.options import SweepOptions
from muster.base.errors import UsageError
from muster.cli.commands.sweep import flags_of_sweep
from muster.cli.recipes import train_recipe, vet_new, with_seeds_as_stored
from muster.farm.space_texts import parse_seeds
from muster.run.folder import RunFolder
from muster_recipes.reasoning.config import ReasoningConfig


@pytest.mark.parametrize("recipe", ["ssm", "ssvae"])
@pytest.mark.parametrize(
    ("words", "seeds"),
    [
        (["3"], [0, 1, 2]),
        (["3,"], [3]),
        (["3:4"], [3]),
        (["3,5,8"], [3, 5, 8]),
        (["3", "5", "8"], [3, 5, 8]),
        (["10:13"], [10, 11, 12]),
    ],
)
def test_seeds_of_a_recipe_are_those_of_a_function(
    recipe: str, words: list[str], seeds: list[int]
) -> None:
    assert _seeds(recipe, "--seeds", *words, "--quiet") == seeds
    if len(words) == 1:
        assert _seeds(recipe, f"--seeds={words[0]}") == seeds
        assert list(parse_seeds(words[0])) == seeds


def _seeds(recipe: str, *words: str) -> list[int]:
    return list(flags_of_sweep([recipe, *words]).recipe.seeds)


@pytest.mark.parametrize("text", ["x", "", "0", "1,1"])
def test_what_are_no_seeds_is_refused_in_both(text: str) -> None:
    with pytest.raises(UsageError):
        _seeds("ssm", "--seeds", text)
    with pytest.raises(UsageError):
        parse_seeds(text)


def test_an_older_run_keeps_its_one_seed() -> None:
    """There ``--seeds 3`` was the seed 3, which its stored settings say."""
    words = ["ssm", "--seeds", "3", "--no-gd"]
    assert with_seeds_as_stored({"seeds": [3]}, words) == ["ssm", "--seeds", "3,", "--no-gd"]
    assert with_seeds_as_stored({"seeds": [3]}, ["--seeds=3"]) == ["--seeds=3,"]
    assert with_seeds_as_stored({"seeds": [0, 1, 2]}, words) == words
    assert with_seeds_as_stored({}, words) == words


def test_a_sweep_of_a_recipe_counts_its_seeds(muster_main: MusterCli, tmp_path: Path) -> None:
    words = ("sweep", "ssm", "--no-gnc", "--student-dims", "4", "--dry-run", "--json")
    done = muster_main(*words, "--seeds", "3")
    assert done.returncode == 0, done.stderr
    assert '"tasks": 3' in done.stdout
    done = muster_main(*words, "--seeds", "3,")
    assert '"tasks": 1' in done.stdout


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "own_recipes.py").write_text(read_program("own_recipes.py"))
    return tmp_path


def test_a_recipe_in_a_file_has_its_flags_and_plan(own: Path, muster_main: MusterCli) -> None:
    words = ("sweep", "own_recipes.py:SQUARES", "--widths", "1", "2", "3", "--num-seeds", "2")
    done = muster_main(*words, "--dry-run", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["tasks"] == 6
    shown = muster_main("sweep", "own_recipes.py:SQUARES", "--help").stdout
    assert "Squares of several widths." in shown
    assert "Sides of the squares" in shown


def test_a_map_recipe_in_a_file_has_its_flags_and_source(own: Path, muster_main: MusterCli) -> None:
    done = muster_main(
        "map", "own_recipes.py:SHOUT", "--words", "a", "b", "c", "--dry-run", "--json"
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["records"] == 3
    assert found["output"].endswith("shouted.jsonl")


def test_a_recipe_of_another_command_is_sent_there(own: Path, muster_main: MusterCli) -> None:
    for command, word, right in (
        ("map", "own_recipes.py:SQUARES", "sweep"),
        ("sweep", "own_recipes.py:SHOUT", "map"),
        ("train", "own_recipes.py:SHOUT", "map"),
        ("sweep", "reasoning", "map"),
        ("sweep", "digits", "train"),
        ("train", "ssm", "sweep"),
        ("map", "ppo", "train"),
    ):
        done = muster_main(command, word)
        assert done.returncode == 2
        assert f"{word} is a recipe of `muster {right}`" in done.stderr
        assert f"write: muster {right} {word}" in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (
            "train har --data-dir x --synthetic-seed 1",
            "--synthetic-seed 1 has no effect with --data-",
        ),
        ("train ppo --memory none --hidden 8", "--hidden 8 has no effect with --memory none"),
        ("train clstm-ppo --max-gap-bars 3", "--max-gap-bars 3.0 has no effect without --data"),
        ("map reasoning --eval-temperature 0.1", "--eval-temperature 0.1 has no effect without gr"),
        ("sweep ssm --num-seeds 3 --seeds 9,2", "--num-seeds 3 has no effect beside --seeds"),
        ("sweep ssm --no-gnc --gnc-num-samples 9", "--gnc-num-samples 9 has no effect with --no-g"),
    ],
)
def test_a_flag_of_a_recipe_without_effect_is_refused_of_new_runs(
    line: str, says: str, muster_main: MusterCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs that were begun with one go on, and are reported."""
    monkeypatch.chdir(tmp_path)
    words = (*line.split(), "--run-dir", "r", "--dry-run", "--devices", "cpu:1")
    refused = muster_main(*words)
    assert refused.returncode == 2 and says in refused.stderr, refused.stderr
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "run.json").write_text("{}")
    assert "has no effect" not in muster_main(*words).stderr
    assert says in muster_main(*words, "--restart").stderr


def test_a_package_offers_recipes_by_entry_points(
    own: Path, muster_main: MusterCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = own / "own_recipes-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own-recipes\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[muster.recipes]\nsquares = own_recipes:SQUARES\nshout = own_recipes:SHOUT\n"
        "broken = own_recipes:NOWHERE\ndigits = own_recipes:NOWHERE\nnone = json:dumps\n"
    )
    monkeypatch.syspath_prepend(own)
    try:
        done = muster_main("sweep", "squares", "--num-seeds", "4", "--dry-run", "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["tasks"] == 8
        done = muster_main("map", "shout", "--dry-run", "--json")
        assert done.returncode == 0, done.stderr
        assert "is a recipe of `muster map`" in muster_main("sweep", "shout").stderr
        broken = muster_main("sweep", "broken")
        assert broken.returncode == 2
        assert "The recipe broken of own-recipes cannot be loaded" in broken.stderr
        none = muster_main("sweep", "none").stderr
        assert "The recipe none of own-recipes is not a recipe but of type function" in none
        assert "is a recipe of `muster train`" in muster_main("sweep", "digits").stderr
        assert isinstance(train_recipe("digits"), TrainRecipe)
        far = " ".join(muster_main("sweep", "elsewhere").stderr.split())
        assert "It may come from a package that is not installed here." in far
        assert "shout, squares" in " ".join(muster_main("sweep", "squaers").stderr.split())
    finally:
        sys.modules.pop("own_recipes", None)


@pytest.mark.thorough
def test_recipes_in_a_file_run_to_their_tables_and_figures(
    own: Path, muster_cli: MusterCli
) -> None:
    words = ("sweep", "own_recipes.py:SQUARES", "--widths", "2", "3", "--devices", "cpu:1",
             "--run-dir", "squares")  # fmt: skip
    done = muster_cli(*words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (own / "squares" / "figures" / "squares.txt").read_text() == "2 4.0\n3 9.0"
    more = muster_cli(*words, "--num-seeds", "2")
    assert more.returncode == 0, more.stdout + more.stderr
    assert (own / "squares" / "figures" / "squares.txt").read_text() == "2 4.5\n3 9.5"
    done = muster_cli("map", "own_recipes.py:SHOUT", "--devices", "cpu:1", "--run-dir", "shouted")
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"text":"ONE!"' in (own / "shouted.jsonl").read_text().splitlines()[0]
    assert "letters" in done.stdout


def test_help_names_the_folder_that_a_training_really_gets(muster_main: MusterCli) -> None:
    shown = " ".join(muster_main("train", "digits", "--help").stdout.split())
    assert "runs/<name>-<hash of the settings" in shown.replace("│ ", "")
    assert "runs/<name>-<time>" not in shown


def test_a_short_training_of_a_recipe_with_a_warm_up_is_taken(muster_main: MusterCli) -> None:
    for words in (("--epochs", "1"), ("--num-epochs=1",)):
        done = muster_main("train", "har", *words, "--devices", "cpu:1", "--dry-run")
        assert done.returncode == 0, done.stderr
    done = muster_main("train", "har", "--epochs", "1", "--warmup-epochs", "2", "--dry-run")
    assert done.returncode == 2
    assert "--warmup-epochs 2 is longer" in done.stderr


def test_a_map_by_stages_that_has_begun_is_not_asked_what_a_new_one_is(tmp_path: Path) -> None:
    """The folder of its last stage, which is the run's, comes last."""
    config = ReasoningConfig(dataset="gsm8k", grading="off", eval_temperature=0.5)
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(UsageError, match="without grading"):
        vet_new(config, folder, SweepOptions())
    folder.stage(0).mkdir(parents=True)
    vet_new(config, folder, SweepOptions())
    with pytest.raises(UsageError, match="without grading"):
        vet_new(config, folder, SweepOptions(restart=True))


def test_one_refusal_says_all_that_a_plan_of_a_task_needs(muster_main: MusterCli) -> None:
    done = muster_main("plan", "digits")
    assert done.returncode == 2
    said = " ".join(done.stderr.split())
    assert "--calibrate" in said and "which gives both" in said
