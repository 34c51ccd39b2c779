"""What a recipe makes of its results is called on the first of them."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from tests.programs import read_program

import muster
from muster.api.sweeps.housekeeping import Rehearsal, rehearse_sweep
from muster.run.folder import RunFolder

Main = Callable[..., CompletedProcess[str]]


@dataclasses.dataclass(frozen=True)
class Config:
    pass


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A sweep with two tasks done: y = 1, 2 at x = 1, 2."""
    place = tmp_path_factory.mktemp("rehearsal")
    (place / "f.py").write_text("def f(x: int) -> dict:\n    return {'y': x}\n")
    how: dict[str, Any] = {"devices": "cpu:1", "run_dir": place / "run", "monitor_interval_s": 0.0}
    return RunFolder(muster.sweep(f"{place}/f.py:f", grid={"x": [1, 2]}, **how).path)


def good(config: Any, rows: Iterator[Any]) -> list[dict[str, Any]]:
    return [{"y": row["y"], "late": None} for row in rows]


def draws(config: Any, table: list[Any], folder: Path) -> list[Path]:
    (folder / "figure.png").write_bytes(b"")
    return [folder / "figure.png"]


def looked_at(folder: RunFolder, **hooks: Any) -> tuple[Rehearsal, list[str]]:
    recipe = muster.Recipe(
        name="own", config=Config, targets={}, plan=lambda c: iter(()), count=lambda c: 2,
        **{"summarise": good, "draw": draws, **hooks},
    )  # fmt: skip
    told: list[str] = []
    rehearsal = Rehearsal(lambda place: rehearse_sweep(recipe, Config(), place), told.append)
    assert not rehearsal.look(folder, 0)
    assert rehearsal.look(folder, 1) == (rehearsal.error is not None)
    assert not rehearsal.look(folder, 2) or rehearsal.error is not None
    return rehearsal, told


def files(folder: RunFolder) -> list[Path]:
    """Without SQLite's, which come and go with every reader."""
    return sorted(path for path in folder.path.rglob("*") if "sqlite-" not in path.name)


def matplotlib_is_missing(*_: Any) -> list[Path]:
    raise ImportError("No module named 'matplotlib'", name="matplotlib")


@pytest.mark.parametrize("draw", [draws, matplotlib_is_missing])
def test_what_is_right_says_nothing_and_leaves_nothing(finished: RunFolder, draw: Any) -> None:
    before = files(finished)
    rehearsal, told = looked_at(finished, draw=draw)
    assert rehearsal.error is None
    assert told == []
    assert files(finished) == before
    assert not list(Path(tempfile.gettempdir()).glob("muster-rehearsal-*/figure.png"))


@pytest.mark.parametrize(
    ("hook", "mistake", "cause"),
    [
        ("summarise", lambda config, rows: [{"y": row["yy"]} for row in rows], "'yy'"),
        ("summarise", lambda config, rows: [undefined for row in rows], "undefined"),  # type: ignore[name-defined]  # noqa: F821
        ("summarise", lambda config, rows: rows.sort(), "sort"),
        ("summarise", lambda config: [], "positional argument"),
        ("summarise", lambda config, rows: {"y": 1}, "gives dict, not a list"),
        ("summarise", lambda config, rows: [{"y": object()}], "cannot hold"),
        ("draw", lambda config, table, folder: folder.savefig(), "savefig"),
        ("draw", lambda config, table, folder: None, "gives NoneType, not a list"),
    ],
)
def test_a_sure_mistake_is_told_with_its_hook_and_cause(
    finished: RunFolder, hook: str, mistake: Any, cause: str
) -> None:
    rehearsal, told = looked_at(finished, **{hook: mistake})
    assert rehearsal.error is not None
    assert f"{hook} of the recipe own" in told[0]
    assert cause in told[0]
    if "gives" not in told[0]:
        assert f"{__file__}:" in told[0] or "positional argument" in told[0]


@pytest.mark.parametrize(
    "few",
    [
        lambda config, rows: {1: []}[len(list(rows))],
        lambda config, rows: next(row for row in rows if row["y"] == 9),
        lambda config, rows: [][99],
        lambda config, rows: 1 / (len(list(rows)) - 2),
        lambda config, rows: [{"y": row["error"] + 1} for row in rows],
        lambda config, rows: max(row["y"] for row in rows if row["y"] == 9),
    ],
)
def test_what_few_rows_may_be_to_blame_for_is_a_note(finished: RunFolder, few: Any) -> None:
    rehearsal, told = looked_at(finished, summarise=few)
    assert rehearsal.error is None
    assert len(told) == 1
    assert told[0].startswith("note       summarise of the recipe own could not be rehearsed")


def test_before_there_are_results_it_waits(tmp_path: Path) -> None:
    calls: list[RunFolder] = []

    def call(folder: RunFolder) -> bool:
        calls.append(folder)
        return False

    rehearsal = Rehearsal(call, lambda line: None)
    for num_done in range(9):
        rehearsal.look(RunFolder(tmp_path), num_done)
    assert len(calls) == 4  # at 1, 2, 4, 8: what has to be read grows with their number


@pytest.mark.parametrize(
    ("words", "result"),
    [
        (("sweep", "mistaken_recipes.py:SWEEP", "--run-dir", "run"), "run/table.csv"),
        (
            ("map", "mistaken_recipes.py:MAP", "--run-dir", "run", "--chunk-rows", "1"),
            "run/figures/figure.txt",
        ),
    ],
    ids=["sweep", "map"],
)
def test_a_mistake_ends_the_run_after_its_first_task(
    words: tuple[str, ...], result: str, muster_main: Main, tmp_path: Path
) -> None:
    (tmp_path / "mistaken_recipes.py").write_text(read_program("mistaken_recipes.py"))
    how = ("--devices", "cpu:1", "--monitor-interval", "0", "--quiet")
    done = muster_main(*words, *how)
    assert done.returncode == 2, done
    assert "summarise of the recipe mistaken failed on the first results" in done.stderr
    assert "'yy'" in done.stderr
    assert "mistaken_recipes.py:" in done.stderr
    assert "Traceback" not in done.stderr
    run = RunFolder(tmp_path / "run")
    assert not run.figures.exists()
    assert not run.table_csv.exists()
    (tmp_path / "mended").touch()
    done = muster_main(*words, *how)
    assert done.returncode == 0, done
    assert (tmp_path / result).exists()
