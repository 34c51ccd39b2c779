"""Runs of another user: what may not be read is said in a sentence, beside what may."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import muster
from muster.base.errors import MusterError
from muster.web.content.index import PAGES, data_of
from muster.web.folder import Folders
from muster.web.query import Query
from muster.web.watch import RunLook, RunsLook

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
        RunLook(folders.find(row["id"])).look(["1"])
    RunsLook(folders).look(())
    return found


def as_nobody(runs: Path) -> dict[str, Any]:
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        try:
            os.write(write, json.dumps(looked(runs)).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as file:
        text = file.read()
    os.waitpid(pid, 0)
    return json.loads(text)  # type: ignore[no-any-return]


def test_runs_that_another_user_keeps_to_himself_say_so(runs: Path) -> None:
    own = looked(runs)  # and so everything is imported before this user's rights are given up
    assert all(one["state"] == "done" and not one["log"] for one in own.values())
    found = as_nobody(runs)
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
