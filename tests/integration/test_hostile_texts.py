"""Users' texts are data, from where they come in to wherever they come out."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from tests.hostile_texts import HOSTILE, ORDERS, Terminal, orders_in, unescape_surrogates

import muster
from muster.farm.canonical import decode, escape_surrogates

pytestmark = pytest.mark.thorough  # tests/unit/cli/test_hostile_screens.py is quick
PROGRAM = Path(__file__).parents[1] / "programs" / "hostile_task.py"
#: A folder may be called so.
NAME = "run[red]\x1b[2J\udcff=<b>\u202e{x}"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> muster.Run:
    return muster.sweep(
        f"{PROGRAM}:task",
        grid={"text": list(HOSTILE.values()), "fails": [False, True]},
        devices="cpu:1",
        run_dir=tmp_path_factory.mktemp("hostile") / NAME,
        keep_going=True,
        monitor_interval_s=0,
    )


def test_every_task_ends_as_it_should(run: muster.Run) -> None:
    counts = run.status().counts
    assert (counts["done"], counts["failed"]) == (len(HOSTILE), len(HOSTILE))


def test_tables_hold_every_text(run: muster.Run, tmp_path: Path) -> None:
    with run.folder.results_parquet.open("rb") as file:
        table = pq.read_table(file).to_pylist()
    assert [unescape_surrogates(row["text"]) for row in table[::2]] == [*HOSTILE.values()]
    assert [unescape_surrogates(row["metric_text"]) for row in table[::2]] == [*HOSTILE.values()]
    assert [unescape_surrogates(row["list"][0]) for row in table[::2]] == [*HOSTILE.values()]
    for text, row in zip(HOSTILE.values(), table[::2], strict=True):
        assert row[escape_surrogates(f"key {text[:100]}")] == 1
    run.export(tmp_path / "t.jsonl")
    lines = [decode(line) for line in (tmp_path / "t.jsonl").read_bytes().split(b"\n")[:-1]]
    assert [line["text"] for line in lines[::2]] == [*HOSTILE.values()]
    csv.field_size_limit(10**8)
    with run.folder.results_csv.open(newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))
    assert len(rows) == 1 + 2 * len(HOSTILE)
    for cell in (cell for row in rows for cell in row):
        assert not re.match(r"[=+\-@\t\r]", cell) or re.fullmatch(r"[+-]?[\d.e+-]+", cell), cell


def look_at(run: muster.Run) -> list[tuple[str, ...]]:
    path = str(run.path)
    tasks = [
        ("logs", path, str(2 * i + 1 + fails)) for i in range(len(HOSTILE)) for fails in (0, 1)
    ]
    return [("list", "--root", str(run.path.parent)), ("status", path), ("errors", path), *tasks]


def test_no_looking_command_gives_orders_to_a_terminal(
    run: muster.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from muster.cli.main import main

    out, error = Terminal(), Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", error)
    monkeypatch.setenv("TERM", "dumb")
    codes = {words: main(list(words)) for words in look_at(run)}
    assert set(codes.values()) == {0}, codes
    assert not orders_in(out.getvalue())
    assert not orders_in(error.getvalue())


def test_json_of_looking_commands_is_json(
    run: muster.Run, muster_main: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    for command in ("status", "errors"):
        done = muster_main(command, str(run.path), "--json")
        assert done.returncode == 0, done.stderr
        shown = json.loads(done.stdout)
        assert not ORDERS.search(done.stdout)
        assert command == "errors" or shown["name"] == NAME


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.found.add(tag)


def test_the_page_of_a_report_is_plain(
    run: muster.Run, muster_main: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    done = muster_main("report", str(run.path))
    assert done.returncode == 0, done.stderr
    page = run.folder.report_html.read_text(encoding="utf-8")
    assert "script" not in Tags(page).found
    assert not ORDERS.search(page)
    assert len(page) < 5_000_000
