"""What the screen says of records: never fewer than none, and no row twice."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import muster
from muster.api.look.why import why
from muster.api.maps.progress import RecordCount
from muster.api.maps.publish import tally
from muster.api.runs import Run
from muster.farm.view import RunView
from muster.pipeline.journal import Journal
from muster.run.folder import RunFolder
from muster.web.content import runs
from muster.web.folder import Folder


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


def test_a_map_whose_chunks_are_all_done_has_no_row_left() -> None:
    """A worker that died had stored rows that it had not told of."""
    count = RecordCount(total=300)
    assert count.of(view_of(records=290)).num_done == 290
    assert count.of(view_of(records=290)._replace(num_done=4)).num_done == 300


def same(record: dict[str, Any]) -> dict[str, Any]:
    return record


def begin_again(state: int) -> None:
    """The second chunk of two has three rows in its journal, one of them rejected, and has that
    state in the ledger: open, or failed."""
    with closing(sqlite3.connect("run/ledger.sqlite")) as ledger:
        ledger.execute("DELETE FROM results WHERE task_id = 2")
        ledger.execute("UPDATE tasks SET state = ? WHERE task_id = 2", (state,))
        [key] = ledger.execute("SELECT key FROM tasks WHERE task_id = 2").fetchone()
        ledger.commit()
    left = [Path("run/published.json"), Path("out.jsonl")]
    for path in [*left, *Path("run/parts").rglob(f"{key.hex()}.*")]:
        path.unlink()
    reject = {"id": 7, "row": 7, "stage": "same", "reason": "not this one", "traceback": ""}
    journal = Journal(RunFolder(Path("run")).parts_of(1), key.hex())
    journal.add(0, 2, [b'{"id":5,"n":5}\n{"id":6,"n":6}\n'], 2)
    journal.add(2, 3, [], 0, rejects=json.dumps(reject).encode() + b"\n", num_rejects=1)
    journal.close()


@pytest.mark.parametrize("state", [0, 3])
def test_rows_of_chunks_that_were_begun_are_done_when_a_map_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: int
) -> None:
    """Its progress began with the rows of finished chunks, and jumped when the others were done."""
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_text("".join(f'{{"n": {n}}}\n' for n in range(10)))
    views: list[RunView] = []

    def start() -> Any:
        views.clear()
        return muster.map(
            same, "in.jsonl", "out.jsonl", executor="inline", devices="cpu:1", chunk_rows=5,
            run_dir="run", show=views.append, keep_parts=True,
        )  # fmt: skip

    def ended() -> list[int]:
        return [view.num_done + view.num_failed for view in views]

    start()
    assert ended()[0] == 0 and ended()[-1] == 10
    begin_again(state)
    run, web = Run("run"), Folder(tmp_path / "run")
    assert [kept.num_rows for kept in tally(run.folder).begun] == [3]
    if state == 0:
        assert tally(run.folder).num_begun == 3
        assert why(run).sentence == "Unfinished: 8 of 10 records done."
        counts = runs.counts(web, run, run.status())
        assert (counts["done"], counts["waiting"], counts["total"]) == (8, 2, 10)
        assert runs.progress(web, run, run.status()) == 0.8
    mapped = start()
    assert (views[0].num_done, views[0].num_failed, views[0].total) == (7, 1, 10)
    assert (views[-1].num_done, views[-1].num_failed) == (9, 1)
    assert ended() == sorted(ended())
    lines = Path("run/metrics.jsonl").read_text().splitlines()
    last = [json.loads(line) for line in lines if "rejected" in line][-1]
    assert (last["step"], last["rejected"], last["rejected/same"]) == (10, 1, 1)
    assert (mapped.num_in, mapped.num_rejected, mapped.num_begun) == (10, 1, 0)
    assert start().was_done and not views
