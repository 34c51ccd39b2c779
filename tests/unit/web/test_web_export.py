"""`muster web --export`: pages in files that need no server, whole or not there."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.made_runs import made_sweep

from muster.base.errors import SetupError, UsageError
from muster.cli.main import main
from muster.web import export as exporting
from muster.web.export import export, packed
from muster.web.folder import Folders, id_of


def data(copy: Path, name: str) -> Any:
    text = (copy / f"api/{name}.js").read_text("utf-8")
    found = re.fullmatch(r"musterCopy\(JSON\.parse\((.*)\)\);\n", text, re.S)
    assert found is not None
    return json.loads(json.loads(found[1]))


def test_a_copy_has_every_page_with_its_data_and_no_link_to_a_server(tmp_path: Path) -> None:
    run = made_sweep(tmp_path / "runs/first", 60, num_curves=2, num_points=50)
    copy = tmp_path / "copy"

    made = export([tmp_path / "runs"], copy)

    name = f"run/{id_of(run.path)}"
    assert made == (1, 60, 0)
    [row] = data(copy, "runs")["runs"]
    assert row["counts"]["failed"] == 1 and row["bytes"] > run.ledger.stat().st_size
    tasks = data(copy, f"{name}/tasks")
    assert (tasks["total"], len(tasks["rows"])) == (60, 60)
    curves = data(copy, f"{name}/curves")
    assert {(one["name"], len(one["x"])) for one in curves["series"]} == {
        ("loss", 50),
        ("score", 50),
    }
    for page in ("index", name, f"{name}/tasks", f"{name}/errors", f"{name}/about"):
        assert (copy / f"{page}.html").is_file()
    for row in tasks["rows"]:
        assert data(copy, f"{name}/task/{row['key']}")["key"] == row["key"]
    for path in copy.rglob("*.html"):
        text = path.read_text("utf-8")
        assert not re.search(r'(href|src)="/', text)
        for link in re.findall(r'(?:href|src)="([^"#?]+)"', text):
            assert (path.parent / link).exists(), (path, link)


def test_one_damaged_page_is_a_page_that_says_so(tmp_path: Path) -> None:
    exporting._Copy(Folders([]), tmp_path)._html("page", "overview", {}, {"name": 1})
    assert "cannot be made" in (tmp_path / "page.html").read_text()


def test_no_module_of_a_copy_is_looked_for_beside_a_page() -> None:
    text = packed(exporting._STATIC)
    assert "muster/vendor/htm-preact.module.js" in text
    assert not re.search(r'(from|import)\s*\(?\\?"\./', text)


def test_of_a_large_run_a_copy_holds_some_tasks_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "_MOST_TASKS", 10)
    monkeypatch.setattr(exporting, "_TASKS_AT_ONCE", 5)
    run = made_sweep(tmp_path / "runs/first", 200)

    made = export([tmp_path / "runs"], tmp_path / "copy")

    # The two causes of failures lead to tasks beyond the first ten.
    assert (made.num_tasks, made.num_left_out) == (12, 188)
    name = f"run/{id_of(run.path)}"
    for page in (name, f"{name}/tasks", f"{name}/about"):
        assert "This copy holds 12 of the tasks." in (tmp_path / f"copy/{page}.html").read_text()


def test_an_earlier_copy_is_replaced_and_nothing_else_is(tmp_path: Path) -> None:
    made_sweep(tmp_path / "runs/first", 5)
    copy = tmp_path / "copy"
    export([tmp_path / "runs"], copy)
    before = copy.stat().st_ino
    made_sweep(tmp_path / "runs/second", 5)
    assert export([tmp_path / "runs"], copy).num_runs == 2
    assert copy.stat().st_ino != before
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []

    other = tmp_path / "thesis"
    other.mkdir()
    (other / "chapter.tex").write_text("mine")
    with pytest.raises(UsageError, match="something other"):
        export([tmp_path / "runs"], other)
    (tmp_path / "link").symlink_to(other)
    with pytest.raises(UsageError, match="not a folder"):
        export([tmp_path / "runs"], tmp_path / "link")
    assert (other / "chapter.tex").read_text() == "mine"


def test_a_disk_that_cannot_be_written_leaves_the_copy_that_was_there(tmp_path: Path) -> None:
    made_sweep(tmp_path / "runs/first", 5)
    (tmp_path / "file").write_text("")
    with pytest.raises(SetupError, match="Cannot write the copy"):
        export([tmp_path / "runs"], tmp_path / "file/copy")


@pytest.mark.thorough
def test_a_kill_in_the_middle_leaves_no_half_copy(tmp_path: Path) -> None:
    made_sweep(tmp_path / "runs/first", 400)
    copy, half = tmp_path / "copy", tmp_path / ".copy.partial/run"
    code = "import sys; from muster.cli.main import main; main(sys.argv[1:])"
    argv = ["web", str(tmp_path / "runs"), "--export", str(copy)]
    writer = subprocess.Popen([sys.executable, "-c", code, *argv])
    try:
        until = time.monotonic() + 120
        while not half.exists() and time.monotonic() < until and writer.poll() is None:
            time.sleep(0.005)
        os.kill(writer.pid, signal.SIGKILL)
    finally:
        writer.wait()
    assert not copy.exists()

    export([tmp_path / "runs"], copy)

    assert not half.parent.exists()
    assert (copy / "index.html").is_file()


def test_a_run_that_cannot_be_read_is_a_page_that_says_so(tmp_path: Path) -> None:
    made_sweep(tmp_path / "runs/good", 5)
    bad = made_sweep(tmp_path / "runs/bad", 5)
    bad.ledger.write_bytes(b"not a database" * 1000)

    assert export([tmp_path / "runs"], tmp_path / "copy").num_runs == 1

    text = (tmp_path / f"copy/run/{id_of(bad.path)}.html").read_text()
    assert "damaged" in text


def test_an_export_is_a_command_that_starts_no_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made_sweep(tmp_path / "runs/first", 5)
    argv = ["web", str(tmp_path / "runs"), "--export", str(tmp_path / "copy")]
    assert main(argv) == 0
    assert "1 run: open" in capsys.readouterr().out
    assert main([*argv, "--port", "8765"]) == 2
    assert "--export starts no server" in capsys.readouterr().err


def test_a_run_is_named_as_in_every_other_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`muster status first` worked, and `muster web first` was refused."""
    made_sweep(tmp_path / "runs/first", 3)
    monkeypatch.chdir(tmp_path)
    assert main(["web", "first", "--export", "copy"]) == 0
    assert capsys.readouterr().out.startswith("1 run: open copy/index.html")
