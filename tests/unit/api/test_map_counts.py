"""What the screen says of records: never fewer than none, and no row twice."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import muster
from muster.api.maps.progress import RecordCount
from muster.farm.view import RunView


def view_of(**numbers: float) -> RunView:
    return RunView(
        "map-x", 4, 0, 0, 0, 2, 0, 1.0, None, None, "running", (), (), numbers=numbers
    )  # fmt: skip


def test_rows_that_a_lost_host_took_along_leave_no_count_below_zero() -> None:
    count = RecordCount(total=300, before=20, rejected_before=20)
    view = count.of(view_of(records=300, rejected=281))
    assert (view.num_done, view.num_failed) == (0, 300)
    assert count.of(view_of(records=10, rejected=4)).num_done == 6


def three(record: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"id": f"{record['n']}.{k}", "n": record["n"]} for k in range(3)]


def choosy(record: dict[str, Any]) -> dict[str, Any]:
    if record["n"] == 0:
        raise ValueError("not this one")
    return record


@pytest.mark.thorough
@pytest.mark.parametrize("devices", ["cpu:1", "cpu:3"])
def test_rows_count_once_whatever_is_rejected_of_them_and_when_a_map_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, devices: str
) -> None:
    """Of three rows all records are rejected, and one row is blank. With several slots in this
    process, all of them tell what it has done."""
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"n": n}) for n in (1, 0, 0, 0)]
    Path("in.jsonl").write_text(
        "\n".join([*lines, "", *(f'{{"n": {n}}}' for n in range(4, 8)), ""])
    )
    views: list[RunView] = []

    def start() -> tuple[int, int, int]:
        muster.map(
            [three, choosy], "in.jsonl", "out.jsonl", executor="inline", devices=devices,
            chunk_rows=5, run_dir="run", show=views.append, keep_parts=True,
        )  # fmt: skip
        return views[-1].num_done, views[-1].num_failed, views[-1].total

    assert start() == (6, 3, 9)
    with closing(sqlite3.connect("run/ledger.sqlite")) as ledger:  # as before the second chunk
        ledger.execute("DELETE FROM results WHERE task_id = 2")
        ledger.execute("UPDATE tasks SET state = 0 WHERE task_id = 2")
        ledger.commit()
    for name in ("run/published.json", "out.jsonl"):
        Path(name).unlink()
    for path in [*Path("run/parts").rglob("*.now")]:
        key = path.stem
        if not path.with_suffix(".errors.jsonl").exists():  # of the second
            for left in path.parent.glob(f"{key}.*"):
                left.unlink()
    views.clear()
    assert start() == (6, 3, 9)
    assert min(view.num_done for view in views) == 2
