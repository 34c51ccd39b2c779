"""The output is never a file that is read, by whatever name."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from muster.api.maps.job import MapJob
from muster.api.maps.plan import _name_as_before
from muster.api.maps.publish import check_not_among_input
from muster.base.errors import UsageError
from muster.pipeline.sinks.formats import spec_of
from muster.pipeline.stages import StageSpec
from muster.run.folder import RunFolder

STAGE = "def same(record):\n    return record\n"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "stage.py").write_text(STAGE)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "in.jsonl").write_text('{"n": 1}\n')
    return tmp_path


def same(path: Path) -> None:
    return


def hard_link(path: Path) -> None:
    os.link("data/in.jsonl", path)


def symbolic_link(path: Path) -> None:
    path.symlink_to(Path("data/in.jsonl").absolute())


def link_to_folder(path: Path) -> None:
    path.symlink_to(Path("data").absolute())


@pytest.mark.parametrize("source", ["data/in.jsonl", "data", "data/*.jsonl", "link.jsonl"])
@pytest.mark.parametrize(
    ("output", "make"),
    [
        ("data/in.jsonl", same),
        ("./data/../data/in.jsonl", same),
        ("other.jsonl", hard_link),
        ("other.jsonl", symbolic_link),
        ("data/", same),
        ("here", link_to_folder),
    ],
)
@pytest.mark.parametrize("more", [[], ["--restart"]])
def test_an_input_is_never_the_output(
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    muster_main: Callable[..., CompletedProcess[str]],
    source: str,
    output: str,
    make: Callable[[Path], None],
    more: list[str],
) -> None:
    monkeypatch.chdir(place)
    make(Path(output))
    Path("link.jsonl").symlink_to("data/in.jsonl")
    words = ["stage.py:same", "--input", source, "--output", output, "--overwrite", *more]
    for last in ([], ["--dry-run"]):
        done = muster_main("map", *words, *last)
        assert done.returncode == 2
        assert "would be replaced by what is made of it" in done.stderr
    assert (place / "data" / "in.jsonl").read_text() == '{"n": 1}\n'
    assert not (place / "runs").exists()


@pytest.mark.parametrize(
    ("source", "output"),
    [("data", "data/out.jsonl"), ("data", "data/deep/out.csv"), ("data/*.jsonl", "data/o.jsonl")],
)
def test_an_output_that_the_next_start_would_read_is_refused(
    place: Path, muster_main: Callable[..., CompletedProcess[str]], source: str, output: str
) -> None:
    words = ["map", "stage.py:same", "--on", "inline", "--input", source, "--output"]
    for more in ([], ["--dry-run"], ["--restart"]):
        done = muster_main(*words, output, *more)
        assert done.returncode == 2
        assert f"The output {output} would lie in the input {source}" in done.stderr
    assert not (place / output).exists()
    assert not (place / "runs").exists()


@pytest.mark.parametrize(
    ("source", "output"),
    [("data", "data/_out/out.jsonl"), ("data/*.jsonl", "data/o.csv"), ("data", "out.jsonl")],
)
def test_an_output_beside_the_input_is_not(
    place: Path, muster_main: Callable[..., CompletedProcess[str]], source: str, output: str
) -> None:
    words = ["map", "stage.py:same", "--on", "inline", "--input", source, "--output", output]
    for says in ("1 record in", "nothing to do"):
        done = muster_main(*words)
        assert done.returncode == 0, done.stderr
        assert says in done.stdout


def test_an_output_without_a_record_is_explained(
    place: Path, muster_main: Callable[..., CompletedProcess[str]]
) -> None:
    (place / "stage.py").write_text("def same(record):\n    record['m'] = 1\n")
    done = muster_main(
        "map", "stage.py:same", "--on", "inline", "--input", "data", "--output", "out.jsonl"
    )
    assert done.returncode == 0, done.stderr
    assert "no record is left in the output: a stage returned None for it" in done.stdout


@pytest.mark.parametrize(
    ("source", "output", "is_refused"),
    [
        ("data/w[1].jsonl", "data/w1.jsonl", False),  # a file of that name is itself
        ("data/w[12].jsonl", "data/w1.jsonl", True),
        ("*/*.jsonl", "data/out.jsonl", True),
        ("*/*.jsonl", "out.jsonl", False),
        ("*/*.jsonl", "data/deep/out.jsonl", False),
        ("**/*.jsonl", "data/deep/out.jsonl", True),
        ("**/*.jsonl", "out.jsonl", True),
        ("**/*.jsonl", "data/.deep/out.jsonl", False),
        ("data/../*/*.jsonl", "link/out.jsonl", True),
        ("data/*", "data/.out.jsonl", False),
        ("*/*.jsonl", "data/", True),  # its parts
        ("data/*", "data/deep/", False),
        ("data/**", "data/deep/", True),
        (".", "runs/a/out.jsonl", False),  # a run folder is left out
        (".", "runs/out.jsonl", True),
        ("**/*.jsonl", "runs/a/out.jsonl", False),
        ("**/*.jsonl", "runs/out.jsonl", True),
        ("runs/*/out.jsonl", "runs/a/out.jsonl", True),
        ("link", "data/out.jsonl", True),
        ("data", "link/out.jsonl", True),
    ],
)
def test_an_output_is_refused_where_a_later_start_would_read_it(
    place: Path, monkeypatch: pytest.MonkeyPatch, source: str, output: str, is_refused: bool
) -> None:
    monkeypatch.chdir(place)
    (place / "data" / "w[1].jsonl").write_text('{"n": 2}\n')
    (place / "link").symlink_to("data")
    RunFolder(place / "runs" / "a").create()
    (place / "runs" / "a" / "run.json").write_text("{}")
    job = MapJob(
        name="x", input=source, output=spec_of(output),
        stages=(StageSpec(location="stage.py", attribute="same"),),
    )  # fmt: skip
    if not is_refused:
        check_not_among_input(job)
        return
    with pytest.raises(UsageError, match="would lie in the input"):
        check_not_among_input(job)


def test_the_folder_that_holds_the_runs_is_an_input_of_an_interrupted_map(
    place: Path, muster_main: Callable[..., CompletedProcess[str]]
) -> None:
    (place / "stage.py").write_text(WAITS)
    (place / "data" / "in.jsonl").write_text('{"n": 1}\n' * 30)
    words = ["map", "stage.py:same", "--on", "inline", "--input", ".", "--output", "_out.jsonl"]
    assert muster_main(*words).returncode == 1
    [run] = (place / "runs").iterdir()
    assert (run / "run.json").exists()
    (place / "go").touch()
    done = muster_main(*words)
    assert done.returncode == 0, done.stderr
    assert len((place / "_out.jsonl").read_text().splitlines()) == 30


WAITS = """
from pathlib import Path

def same(record):
    if not Path("go").exists():
        raise ValueError("not yet")
    return record
"""
WORDS = ["map", "stage.py:same", "--output", "out.jsonl", "--on", "inline"]


def lines(place: Path) -> int:
    return len((place / "out.jsonl").read_text().splitlines())


@pytest.mark.parametrize(
    ("again", "more"),
    [
        ("same", []),
        ("same", ["--stage-by-stage"]),
        ("resume", []),
        ("resume", ["--stage-by-stage"]),
        ("resume a stage", ["--stage-by-stage"]),
    ],
)
def test_what_overwrite_allowed_holds_for_the_resumed_run(
    place: Path, muster_main: Callable[..., CompletedProcess[str]], more: list[str], again: str
) -> None:
    (place / "stage.py").write_text(WAITS + "\nboth = [same, same]\n")
    (place / "data" / "in.jsonl").write_text('{"n": 1}\n' * 30)
    (place / "out.jsonl").write_text("somebody else's\n")
    words = ["map", "stage.py:both", *WORDS[2:], "--input", "data/in.jsonl", *more]
    assert "was not made by this run" in muster_main(*words).stderr
    assert muster_main(*words, "--overwrite").returncode == 1
    assert (place / "out.jsonl").read_text() == "somebody else's\n"
    (place / "go").touch()
    [run] = (place / "runs").iterdir()
    if more:
        told = muster_main("status", str(run))
        assert told.returncode == 2
        assert f"muster resume {run}" in told.stderr
    what = {"resume": run, "resume a stage": run / "stages" / "0"}.get(again)
    done = muster_main(*words) if what is None else muster_main("resume", str(what))
    assert done.returncode == 0, done.stderr
    assert lines(place) == 30


@pytest.mark.parametrize("more", [[], ["--restart"]])
def test_a_kill_behind_the_rename_of_a_restart_keeps_the_right_to_the_output(
    place: Path, muster_main: Callable[..., CompletedProcess[str]], more: list[str]
) -> None:
    words = [*WORDS, "--input", "data/in.jsonl"]
    assert muster_main(*words).returncode == 0
    [run] = (place / "runs").iterdir()
    run.rename(run.with_name(f"{run.name}.before-20260101-000000"))
    (place / "data" / "in.jsonl").write_text('{"n": 2}\n' * 2)
    done = muster_main(*words, *more)
    assert done.returncode == 0, done.stderr
    assert lines(place) == 2
    run.rename(run.with_name(f"{run.name}.before-20260101-000001"))
    (place / "out.jsonl").write_text("somebody else's\n")
    assert "was not made by this run" in muster_main(*words, *more).stderr


def test_a_restart_with_another_output_removes_what_a_kill_has_left_beside_the_first(
    place: Path, muster_main: Callable[..., CompletedProcess[str]]
) -> None:
    words = [*WORDS[:2], "--input", "data/in.jsonl", "--on", "inline", "--run-dir", "run"]
    assert muster_main(*words, "--output", "out.jsonl").returncode == 0
    left = place / ".out.jsonl.12345678.tmp"
    left.write_text("the output so far")
    done = muster_main(*words, "--output", "other.jsonl", "--restart")
    assert "kept in" in done.stdout + done.stderr
    assert not left.exists()


def test_a_path_through_another_folder_is_the_same_plan(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    before = {"place": str(tmp_path / "run"), "output": f"{tmp_path}/a/../o.jsonl", "input": {}}
    fixed = {"output": f"{tmp_path}/b/../o.jsonl", "input": {"files": []}}
    _name_as_before(fixed, before, RunFolder(tmp_path / "run"))
    assert fixed["output"] == before["output"]
