"""Runs of another user: what may not be read is said in a sentence, beside what may."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

import muster
from muster.base.errors import MusterError
from muster.cli.main import main
from muster.web.content.index import PAGES, data_of
from muster.web.folder import Folders
from muster.web.query import Query
from muster.web.watch import RunPoll, RunsPoll

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux" or os.getuid() != 0, reason="becomes another user"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning"),
]


def work(x: int) -> dict[str, int]:
    print("hello")
    return {"y": x}


@pytest.fixture
def runs() -> Iterator[Path]:
    """Below a folder that everybody may look into; the one of the tests is its user's alone."""
    place = Path(tempfile.mkdtemp(prefix="muster-runs-", dir="/tmp"))
    place.chmod(0o755)
    try:
        how: dict[str, Any] = {"devices": "cpu:1", "executor": "local", "run_dir": place / "open"}
        muster.sweep(f"{__file__}:work", grid={"x": [1]}, **how)
        for folder, _, names in os.walk(place):
            os.chmod(folder, 0o755)
            for name in names:
                os.chmod(Path(folder) / name, 0o644)
        for name in ("closed", "record", "ledger", "logs"):
            shutil.copytree(place / "open", place / name)
        (place / "closed").chmod(0o700)
        (place / "record/run.json").chmod(0o600)
        (place / "ledger/ledger.sqlite").chmod(0o600)
        (place / "logs/logs").chmod(0o700)
        yield place
    finally:
        shutil.rmtree(place)


def looked(runs: Path) -> dict[str, Any]:
    """Every page of every run, or why there is none."""
    folders = Folders([runs])
    found: dict[str, Any] = {}
    for row in data_of(folders, "runs", None, Query())["runs"]:
        pages = found[row["name"]] = {"runs": row["verdict"], "state": row["state"]}
        for name in PAGES:
            try:
                data_of(folders, name, row["id"], Query.of(task=1))
                pages[name] = ""
            except MusterError as error:
                pages[name] = str(error)
        RunPoll(folders.find(row["id"])).look(["1"])
    RunsPoll(folders).look(())
    return found


def as_nobody(runs: Path, look: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        try:
            os.write(write, json.dumps(look(runs)).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as file:
        text = file.read()
    os.waitpid(pid, 0)
    return json.loads(text)  # type: ignore[no-any-return]


def test_runs_that_another_user_keeps_private_say_so(runs: Path) -> None:
    own = looked(runs)  # and so everything is imported before this user's rights are given up
    assert all(one["state"] == "done" and not one["log"] for one in own.values())
    found = as_nobody(runs, looked)
    assert found["open"] == own["open"]
    for name in ("closed", "record", "ledger"):
        row = found[name]
        assert row["state"] == "unreadable"
        for page in ("runs", "overview", "tasks", "task", "log", "errors", "curves"):
            assert "Permission denied" in row[page], (name, page)
            assert str(runs / name) in row[page] and "damaged" not in row[page]
    closed = found["logs"]
    assert closed["state"] == "done" and not closed["tasks"]
    assert "Permission denied" in closed["log"]


def told(runs: Path) -> dict[str, Any]:
    """What the commands print of them, and their exit codes."""
    found: dict[str, Any] = {}
    for words in (
        ("list", "--root", str(runs)),
        ("why", str(runs / "closed")),
        ("status", str(runs / "closed")),
        ("errors", str(runs / "record")),
    ):
        out = io.StringIO()
        with redirect_stdout(out), redirect_stderr(out):
            code = main(words)
        found[words[0]] = [code, out.getvalue()]
    return found


def test_commands_say_what_may_not_be_read(runs: Path) -> None:
    """They ended in tracebacks, and one closed folder hid all runs beside it from `muster list`."""
    own = told(runs)
    assert all(code == 0 for code, _ in own.values()), own
    found = as_nobody(runs, told)
    code, text = found.pop("list")
    assert code == 0 and "Permission denied" in text
    assert re.search(r"^open +done ", text, re.MULTILINE), text
    for code, text in found.values():
        assert code == 3 and "Permission denied" in text, text
