"""``muster sweep --from-wandb sweep.yaml``: the words that a sweep file means."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from muster.base.errors import UsageError
from muster.cli.wandb_file import without_sweep_file

pytest.importorskip("yaml")
Main = Callable[..., CompletedProcess[str]]

BAYES = """
program: train.py
project: first-steps
name: sweepdemo
method: bayes
metric:
  goal: minimize
  name: validation_loss
  target: 0.01
parameters:
  learning_rate:
    min: 1e-5
    max: 0.1
    distribution: log_uniform_values
  batch_size:
    values: [16, 32, 64]
  epochs:
    value: 5
  optimizer:
    values: ["adam", "sgd"]
early_terminate:
  type: hyperband
  min_iter: 3
run_cap: 20
"""
GRID = """
method: grid
metric: {name: acc, goal: maximize}
parameters:
  width: {values: [8, 16]}
  fast: {values: [true, false]}
program: main.py
command: ["${env}", "${interpreter}", "-u", "${program}", "--quiet", "${args_no_hyphens}"]
"""


def words(place: Path, text: str, *more: str, has_target: bool = False) -> list[str]:
    path = place / "sweep.yaml"
    path.write_text(text)
    return without_sweep_file(["--from-wandb", str(path), *more], has_target=has_target)[0]


def test_a_sweep_file_becomes_flags_and_a_command(tmp_path: Path) -> None:
    assert words(tmp_path, BAYES, "--devices", "cpu:2") == [
        "--devices", "cpu:2",
        "--space", "learning_rate=log(1e-05,0.1)", "--space", "batch_size=choice(16,32,64)",
        "--space", "optimizer=choice(adam,sgd)",
        "--minimize", "validation_loss", "--sampler", "gp", "--trials", "20",
        "--stop", "asha-stop:min=3,eta=3",
        "--", "python", "train.py", "--epochs=5", "--learning_rate={learning_rate}",
        "--batch_size={batch_size}", "--optimizer={optimizer}",
    ]  # fmt: skip


def test_what_is_otherwise_is_said(tmp_path: Path) -> None:
    (tmp_path / "sweep.yaml").write_text(BAYES)
    flag = f"--from-wandb={tmp_path / 'sweep.yaml'}"
    _, remarks = without_sweep_file([flag], has_target=False)
    said = " ".join(remarks)
    for part in ("Left out: name, project.", "Gaussian process", "target 0.01", "asha-stop"):
        assert part in said


def test_a_target_takes_fixed_values_as_parameters(tmp_path: Path) -> None:
    found = words(tmp_path, BAYES, "train.py:run", has_target=True)
    assert found[0] == "train.py:run" and "--" not in found
    assert "epochs=choice(5)" in found


def test_what_is_typed_goes_before_the_file(tmp_path: Path) -> None:
    typed = ("--trials", "7", "--maximize=acc", "--sampler", "random", "--stop", "none")
    found = words(tmp_path, BAYES, *typed, "--", "python", "own.py", "{learning_rate}")
    assert found.count("--trials") == 1 and "--minimize" not in found
    assert found.count("--sampler") == 1 and found.count("--stop") == 1
    assert found[-4:] == ["--", "python", "own.py", "{learning_rate}"]


@pytest.mark.parametrize("typed", [("--space", "{}"), ("--space={}",)])
@pytest.mark.parametrize("name", ["batch_size", "epochs", "more"])
def test_a_space_that_is_typed_goes_before_that_of_the_file(
    tmp_path: Path, typed: tuple[str, ...], name: str
) -> None:
    words_of_space = [word.format(f"{name}=choice(8,9)") for word in typed]
    found = words(tmp_path, BAYES, *words_of_space)
    assert [word for word in found if f"{name}=" in word] == [
        words_of_space[-1],
        f"--{name}={{{name}}}",
    ]
    found = words(tmp_path, BAYES, "f.py:f", *words_of_space, has_target=True)
    assert [word for word in found if f"{name}=" in word] == words_of_space[-1:]


def test_a_grid_with_a_space_of_ones_own_is_whole_as_well(tmp_path: Path) -> None:
    assert "--trials" not in words(tmp_path, GRID, "--space", "width=choice(1,2,3)")


def test_what_python_writes_otherwise_is_said_of_fixed_values_too(tmp_path: Path) -> None:
    text = BAYES.replace("value: 5", "value: null")
    (tmp_path / "sweep.yaml").write_text(text)
    found, remarks = without_sweep_file(
        ["--from-wandb", str(tmp_path / "sweep.yaml")], has_target=False
    )
    assert "--epochs=null" in found
    assert any("W&B writes True, False and None" in remark for remark in remarks)


def test_a_fixed_name_that_no_parameter_can_have_is_named(tmp_path: Path) -> None:
    text = BAYES.replace("epochs", "num-epochs")
    assert "--num-epochs=5" in words(tmp_path, text)
    assert "num-epochs=choice(5)" in words(tmp_path, text, "f.py:f", has_target=True)
    with pytest.raises(UsageError, match="'num epochs' is not a parameter name"):
        words(tmp_path, BAYES.replace("epochs", "num epochs"), "f.py:f", has_target=True)


def test_a_grid_is_whole_and_its_command_is_kept(tmp_path: Path) -> None:
    (tmp_path / "sweep.yaml").write_text(GRID)
    found, remarks = without_sweep_file(
        ["--from-wandb", str(tmp_path / "sweep.yaml")], has_target=False
    )
    assert found[found.index("--trials") + 1] == "4"
    assert found[found.index("--") + 1 :] == [
        "python", "-u", "main.py", "--quiet", "width={width}", "fast={fast}",
    ]  # fmt: skip
    assert any("true and false" in remark for remark in remarks)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GRID.replace("${args_no_hyphens}", "${args_json}"), r"\$\{args_json\}, which cannot be"),
        (GRID.replace("program: main.py", ""), "names no program"),
        ("- a\n- b\n", "is not a sweep file"),
        ("a: [", "Cannot read the sweep file"),
        (GRID + "imput: 1\n", "Unknown key of the sweep file 'imput'"),
        (BAYES.replace("1e-5", "small"), "min of learning_rate is 'small', which is not a number"),
        (GRID.replace("goal:", "gaol:"), "Unknown key of the metric 'gaol'"),
    ],
)
def test_what_cannot_be_taken_over_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        words(tmp_path, text)


def test_a_missing_file_is_a_sentence(muster_main: Main) -> None:
    done = muster_main("sweep", "--from-wandb", "none.yaml")
    assert done.returncode == 2
    assert "Cannot read the sweep file none.yaml: No such file" in done.stderr


def test_the_command_line_shows_what_the_file_means(tmp_path: Path, muster_main: Main) -> None:
    (tmp_path / "main.py").write_text("")
    (tmp_path / "sweep.yaml").write_text(GRID)
    done = muster_main("sweep", "--from-wandb", "sweep.yaml", "--dry-run", "--devices", "cpu:1")
    assert done.returncode == 0, done.stderr
    assert "4 trials: maximize acc, sampler random" in done.stdout
    assert "method: grid tries every setting" in done.stderr
