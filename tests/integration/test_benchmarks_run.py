"""The benchmarks run and say what they measured; their figures are no matter of pass or fail."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from muster.base.settings import kept_environment
from muster.farm.worker.inbox import Line

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
#: Libraries; what made a fixture; what runs the others.
NO_BENCHMARKS = {"measuring", "dashboard_peers", "record_digits_grid", "all"}
NAMES = sorted(path.stem for path in BENCHMARKS.glob("*.py") if path.stem not in NO_BENCHMARKS)
#: The last test below runs it, with the others' table.
NAMES.remove("makespan")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_quick_run_ends_with_a_table_and_a_record(name: str, tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    done = subprocess.run(
        [sys.executable, BENCHMARKS / f"{name}.py", "--quick", "--json", record],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if done.returncode == 77:
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") >= 3
    assert json.loads(record.read_text())


def test_a_full_run_has_each_benchmark_or_says_that_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    with kept_environment():
        every = runpy.run_path(str(BENCHMARKS / "all.py"))
    runs = {**every["RUNS"], **every["ASKED_FOR"]}
    assert {run.script or name for name, run in runs.items()} == {*NAMES, "makespan"}
    minutes = sum(run.minutes for run in every["RUNS"].values())
    assert 30 < minutes <= 75, "a full run takes about an hour"


@pytest.mark.parametrize("name", [*NAMES, "makespan"])
def test_each_finds_what_it_imports_and_knows_the_flags_of_a_full_run(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    with kept_environment():
        every = runpy.run_path(str(BENCHMARKS / "all.py"))
        main = runpy.run_path(str(BENCHMARKS / f"{name}.py"))["main"]
    runs = {**every["RUNS"], **every["ASKED_FOR"]}
    for record, run in runs.items():
        if (run.script or record) == name:
            words = every["words_of"](run, is_quick=False)
            # What is wrong among the flags is told before the help is shown.
            monkeypatch.setattr(sys, "argv", [f"{name}.py", *words, "--help"])
            with pytest.raises(SystemExit) as ended:
                main()
            assert ended.value.code == 0, capsys.readouterr().err


def test_what_stands_for_a_worker_has_all_that_tasks_ask_of_one(tmp_path: Path) -> None:
    program = runpy.run_path(str(BENCHMARKS / "programs/ssvae_call.py"))
    asked = {name for name in [*vars(Line), *Line.__annotations__] if not name.startswith("_")}
    assert asked and asked <= {*dir(program["Nobody"])}
    context = program["context_in"](tmp_path)
    assert (context.device, context.attempt, context.folder.is_relative_to(tmp_path)) == (
        "cpu",
        1,
        True,
    )


def run_all(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, BENCHMARKS / "all.py", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_one_table_has_the_goals_of_all_that_were_run_and_they_are_not_run_again(
    tmp_path: Path,
) -> None:
    words = ("--quick", "--only", "makespan", "--to", "to")
    done = run_all(tmp_path, *words)
    assert done.returncode == 0, done.stderr
    assert "== 1 of 1: makespan (all in about " in done.stdout
    record = json.loads((tmp_path / "to/makespan.json").read_text())
    [goal] = record["goals"]
    assert goal["what"] == "makespan, × the bound"
    # Too short to mean anything: neither held nor missed.
    assert goal["is_held"] is None
    assert f"makespan   {goal['what']}  {goal['wanted']}" in done.stdout
    assert "0 held, 0 NOT held, 1 not judged" in done.stdout

    again = run_all(tmp_path, *words, "--resume")
    assert again.returncode == 0, again.stderr
    assert "makespan: recorded already" in again.stdout and "== 1 of 1" not in again.stdout
    assert f"makespan   {goal['what']}  {goal['wanted']}" in again.stdout


def test_a_quick_run_does_not_replace_measurements(tmp_path: Path) -> None:
    done = run_all(tmp_path, "--quick", "--to", str(BENCHMARKS / "results"))
    assert done.returncode == 2 and "holds measurements" in done.stderr


def test_one_that_fails_or_takes_too_long_is_named_and_the_others_are_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    with kept_environment():
        every = runpy.run_path(str(BENCHMARKS / "all.py"))
    write = "import sys, pathlib; pathlib.Path(sys.argv[-1]).write_text('{}')"
    for name, text in (("a", "raise SystemExit(3)"), ("b", write), ("c", "raise SystemExit(77)")):
        (tmp_path / f"{name}.py").write_text(text)
    runs = {name: every["Run"](0.1) for name in "abc"}
    codes = every["run_all"]([*runs], runs, {name: [] for name in runs}, tmp_path, tmp_path)
    assert dict(codes) == {"a": 3, "b": 0, "c": 77} and (tmp_path / "b.json").exists()
    said = capfd.readouterr().err
    assert "a has failed: exit code 3" in said and "c has failed" not in said
    assert every["ended"]([sys.executable, "-c", "import time; time.sleep(60)"], 0.2) is None
