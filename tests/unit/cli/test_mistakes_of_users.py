"""What users write wrong is told in a sentence that names it, before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from muster.cli.main import main

WORK = "def square(x: int) -> float:\n    return float(x * x)\n"
RECIPE = """
import dataclasses

from muster import Recipe, RecipeTask

@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    n: int = 3

def plan(config):
    for x in range(config.n):
        yield RecipeTask("square", {"x": x})

def count(config):
    return config.n

def forecast(config):
    return []

MORE

RECIPE = Recipe(
    name="own", config=Settings, targets={"square": "work.py:square"}, plan=plan, count=count,
    summarise=lambda config, rows: [], draw=lambda config, rows, folder: [], forecast=forecast,
)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "work.py").write_text(WORK)
    (tmp_path / "in.jsonl").write_text('{"x": 1}\\n{"x": 2}\\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def refused(
    argv: list[str], here: Path, capsys: pytest.CaptureFixture[str], *, code: int = 2
) -> str:
    assert main([*argv, "--run-dir", "out"]) == code
    told = capsys.readouterr().err
    assert "Traceback" not in told
    # The columns are known once the input is open, which may take a download that is kept.
    assert {path.name for path in (here / "out").glob("*")} <= {"input", "logs", "requests"}
    assert not list((here / "out").rglob("*.json*"))
    return told


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (
            'def plan(config):\n    yield RecipeTask("cube", {})',
            ["plan of the recipe own", "'cube'", "Known: square"],
        ),
        ("def plan(config): pass", ["plan of the recipe own gives NoneType, not RecipeTasks"]),
        (
            "def plan(config): return [('square', {'x': 1}, 0)] * 3",
            ["plan of the recipe own", "gives tuple", "RecipeTask"],
        ),
        ("def plan(config): return [3] * 3", ["plan of the recipe own", "gives int", "RecipeTask"]),
        (
            "def plan(config):\n    yield RecipeTask('square', 3)",
            ["plan of the recipe own", "parameters of type int", "dict"],
        ),
        (
            'def plan(config): raise KeyError("data")',
            ["plan of the recipe own failed", "KeyError: 'data'", "own.py:"],
        ),
        (
            "def count(config): return config.m",
            ["count of the recipe own failed", "no attribute 'm'", "own.py:"],
        ),
        ("def count(): return 3", ["count of the recipe own failed", "TypeError", "own.py:"]),
        ("def count(config): return None", ["count of the recipe own", "gives NoneType"]),
        (
            "def count(config): return 5",
            ["count of the recipe own says 5", "plan gives 3"],
        ),
        (
            "def count(config): return 2",
            ["count of the recipe own says 2", "plan gives more"],
        ),
        (
            "def count(config): return 1500\ndef plan(config):\n"
            '    return (RecipeTask("square", {"x": x}) for x in range(1600))',
            ["count of the recipe own says 1500", "plan gives more"],
        ),
        ("def forecast(config): return 1 / 0", ["forecast of the recipe own failed", "own.py:"]),
    ],
)
@pytest.mark.parametrize("flags", [[], ["--dry-run"]])
def test_a_wrong_recipe_of_a_sweep(
    wrong: str, words: list[str], flags: list[str], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "own.py").write_text(RECIPE.replace("MORE", wrong))
    told = refused(["sweep", "own.py:RECIPE", "--on", "inline", *flags], here, capsys)
    for each in words:
        assert each in told


MAP_RECIPE = """
import dataclasses

from muster import MapRecipe

@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    n: int = 3

def same(record):
    return record

def stages(config):
    return [same]

def source(config):
    return "in.jsonl"

def inform(config):
    return None

def check(config, columns):
    return None

def remarks(config):
    return []

MORE

RECIPE = MapRecipe(name="own", config=Settings, stages=stages, source=source, inform=inform,
                   check=check, remarks=remarks)
"""


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (
            "def stages(config): raise KeyError('model')",
            ["stages of the recipe own failed: KeyError: 'model'", "own.py:"],
        ),
        ("def stages(config): return None", ["stages of the recipe own gives NoneType", "list"]),
        ("def stages(config): return []", ["own has no stage"]),
        ("def source(): return 'in.jsonl'", ["source of the recipe own failed", "own.py:"]),
        ("def inform(config): return config.m", ["inform of the recipe own failed", "own.py:"]),
        (
            "def check(config, columns): return columns.x",
            ["check of the recipe own failed", "own.py:"],
        ),
        ("def remarks(config): return 1 / 0", ["remarks of the recipe own failed", "own.py:"]),
    ],
)
def test_a_wrong_recipe_of_a_map(
    wrong: str, words: list[str], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "own.py").write_text(MAP_RECIPE.replace("MORE", wrong))
    told = refused(["map", "own.py:RECIPE", "--output", "o.jsonl", "--on", "inline"], here, capsys)
    for each in words:
        assert each in told


def test_a_list_without_stages(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "own.py").write_text("STAGES = []\n")
    argv = ["map", "own.py:STAGES", "--input", "in.jsonl", "--output", "o.jsonl", "--on", "inline"]
    assert "STAGES has no stage" in refused(argv, here, capsys)


def test_a_file_is_no_folder_of_runs(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--root", "work.py"]) == 2
    assert "--root work.py is a file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("method", "told"),
    [
        (
            "def __init__(self): raise KeyError('MODEL')",
            "The stage Mine cannot be made: KeyError: 'MODEL'",
        ),
        (
            "def columns(self): return {'x': 'float99'}",
            "The column 'x' is declared as 'float99', which is not a type.",
        ),
        ("def columns(self): return {'x': float}", "is declared as"),
        ("def columns(self): return ['x']", "columns() of Mine gave list, not a dict"),
    ],
)
def test_a_wrong_stage_ends_a_map_before_its_first_record(
    method: str, told: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f"class Mine:\n    {method}\n    def process(self, batch): return batch\n"
    (here / "own.py").write_text(text)
    argv = ["map", "own.py:Mine", "--input", "in.jsonl", "--output", "o.parquet", "--on", "inline"]
    assert main([*argv, "--run-dir", str(here / "out")]) == 1
    said = capsys.readouterr().out
    assert told in said and "out: 0 records in" in said
    assert said.count("cannot be") == 1


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["sweep", "work.py:square", "--x", "1", "2"], "write --grid x=1,2; each value is a task"),
        (["sweep", "work.py:square", "--x=1"], "write --grid x=1; each value"),
        (["sweep", "work.py:square", "--x"], "write --grid x=VALUE,VALUE; each value"),
        (["sweep", "work.py:square", "--y", "1"], "has no flag --y."),
        (["sweep", "e.toml"], "started by muster start e.toml"),
        (["start", "e"], "did you mean e.toml?"),
        (["start", "runs/e"], "goes on with `muster resume RUN`"),
    ],
)
def test_what_belongs_to_another_flag_or_command_is_said_so(
    argv: list[str], says: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "e.toml").write_text('command = "sweep"\ntarget = "work.py:square"\ngrid.x = [1]\n')
    assert main(argv) == 2
    told = capsys.readouterr().err
    assert says in told and "Traceback" not in told, told
