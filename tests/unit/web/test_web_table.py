"""The tasks of a run as columns: they follow the ledger, and say which rows have changed."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from muster.api.start.options import SweepOptions
from muster.farm import canonical
from muster.farm.canonical import payload_and_key
from muster.farm.ledger.connect import remove
from muster.farm.ledger.read import LedgerReader
from muster.farm.ledger.store import Ledger
from muster.farm.task import NewTask
from muster.run.folder import RunFolder
from muster.run.record import new_record, write_run
from muster.web import columns
from muster.web import table as tables
from muster.web.query import BadQuery
from muster.web.table import TaskTable

EVERY: dict[str, Any] = {"sort": "", "descending": False, "text": "", "state": ""}


def add(folder: RunFolder, params: list[dict[str, Any]]) -> None:
    make = payload_and_key("work.py:f")
    ledger = Ledger(folder.ledger)
    ledger.begin()
    target = ledger.target_id("work.py:f")
    made = (make(one) for one in params)
    ledger.add_tasks(NewTask(key, target, payload) for payload, key in made)
    ledger.commit()
    ledger.close()


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    found = RunFolder(tmp_path)
    add(found, [{"x": x, "api_key": "abcdefgh", "name": f"n{x % 3}"} for x in range(300)])
    return found


def cells(page: dict[str, Any], name: str) -> list[Any]:
    at = [column["key"] for column in page["columns"]].index(name)
    return [row["cells"][at] for row in page["rows"]]


def test_the_first_page_is_there_before_all_tasks_were_read(folder: RunFolder) -> None:
    table = TaskTable(folder)
    page = table.page(offset=100, limit=5)
    assert not table.is_ready and page["total"] == 300
    assert cells(page, "x") == [100, 101, 102, 103, 104]
    assert set(cells(page, "api_key")) == {"…"}
    table.refresh()
    assert table.page(offset=100, limit=5) == page


def test_only_what_has_changed_is_read_again(folder: RunFolder) -> None:
    table = TaskTable(folder)
    table.refresh()
    keys, version = table.changed_since(0)
    assert len(keys) == 300
    assert table.refresh() and table.changed_since(version) == ([], version)
    add(folder, [{"x": 1000, "new": 1.5}])
    table.refresh()
    changed, later = table.changed_since(version)
    assert len(changed) == 1 and cells(table.rows(changed), "x") == [1000]
    assert cells(table.page(sort="new", limit=2), "new") == [1.5, None]
    ledger = Ledger(folder.ledger)
    ledger.begin()
    ledger.cancel_open()
    ledger.commit()
    ledger.close()
    table.refresh()
    assert len(table.changed_since(later)[0]) == 301
    assert table.page(state="cancelled")["total"] == 301 and not table.page(state="done")["total"]


def test_the_last_commit_is_read_although_it_could_not_be_at_once(folder: RunFolder) -> None:
    """SQLite writes first, and lets others read it afterwards: nothing else may change then."""
    table = TaskTable(folder)
    os.utime(folder.ledger, ns=(10**18, 10**18))
    assert table.page(state="waiting", limit=1)["total"] == 300
    before = table.signature()
    ledger = Ledger(folder.ledger)
    ledger.begin()
    ledger.cancel_open()
    ledger.commit()
    ledger.close()
    os.utime(folder.ledger, ns=(10**18, 10**18))
    assert table.signature() == before
    assert table.page(state="cancelled", limit=1)["total"] == 300


def test_another_ledger_in_its_place_is_read_from_the_beginning(folder: RunFolder) -> None:
    table = TaskTable(folder)
    table.refresh()
    remove(folder.ledger)
    add(folder, [{"other": name} for name in "ab"])
    table.refresh()
    page = table.page(sort="other", descending=True)
    assert page["total"] == 2 and cells(page, "other") == ["b", "a"]
    assert "x" not in [column["key"] for column in page["columns"]]


def test_a_run_that_was_begun_anew_shows_nothing_of_the_old_one(folder: RunFolder) -> None:
    """Its tasks have the same numbers and states, and its ledger as many of them."""
    record = new_record(folder, "sweep", SweepOptions(), spec={}, code={}, argv=("muster",))
    write_run(folder, record)
    table = TaskTable(folder)
    table.refresh()
    version = table.changed_since(0)[1]
    remove(folder.ledger)
    add(folder, [{"x": -x} for x in range(300)])
    write_run(folder, replace(record, run_id="another"))
    table.refresh()
    assert cells(table.page(sort="x", limit=2), "x") == [-299, -298]
    assert len(table.changed_since(version)[0]) == 300


def test_what_is_no_number_of_a_task_is_found_nowhere(folder: RunFolder) -> None:
    """A page asks for whatever stands in its address; SQLite has no number of 30 digits."""
    with LedgerReader(folder.ledger) as ledger:
        assert [ledger.find(text) for text in ("²", "9" * 30, "9" * 9999)] == [[], [], []]
        assert ledger.find("7")[0][0] == 7


def test_rows_are_sorted_filtered_and_found(folder: RunFolder) -> None:
    table = TaskTable(folder)
    assert cells(table.page(sort="x", descending=True, limit=3), "x") == [299, 298, 297]
    assert cells(table.page(sort="name", limit=1), "name") == ["n0"]
    assert table.page(text="name=n1 x<30")["total"] == 10
    assert table.page(text="n1 x>=30")["total"] == 90
    assert table.page(text="state=waiting")["total"] == 300
    assert table.page(sort="state", text="state!=waiting")["total"] == 0
    for wrong in ("nothing>1", "nothing~x"):
        with pytest.raises(BadQuery, match="no column"):
            table.page(text=wrong)
    with pytest.raises(BadQuery, match="no column"):
        table.page(sort="nothing")


def test_each_column_is_sorted_as_it_is_shown(folder: RunFolder) -> None:
    """What is sorted by is read apart from the rows that are shown."""
    add(folder, [{"x": 2.5, "deep": {"a": 1, "b": [1, 2]}}, {"x": True}, {"x": 10**400}])
    ledger = Ledger(folder.ledger)
    ledger.begin()
    ledger.cancel_open()
    ledger.commit()
    ledger.close()
    for column in TaskTable(folder).page(offset=290)["columns"]:
        table = TaskTable(folder)  # nothing is known yet
        whole = table.page(sort=column["key"], limit=500)
        found = [cell for cell in cells(whole, column["key"]) if cell is not None]
        assert found == sorted(found, key=lambda cell: (isinstance(cell, str), cell))
        assert len(found) == sum(
            cell is not None for cell in cells(table.page(limit=500), column["key"])
        )


def test_results_read_as_a_column_are_those_of_the_rows(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also beside those that are not whole, are in a file that is gone, or take a tag."""
    results: dict[int, bytes | None] = {
        1: b'{"y":1.5,"z":"a"}', 2: b'{"y":2}', 3: canonical.encode({"y": float("nan")}),
        4: canonical.encode({"y": "hf_abcdefghijkl"}), 5: b'{"z":"b"}', 7: b'{"y":', 8: None,
        9: b'{"y":[1,{"token":"x"}]}', 10: canonical.encode({"y": 10**30}), 11: b"",
    }  # fmt: skip
    ledger = Ledger(folder.ledger)
    ledger.begin()
    for number, value in results.items():
        ledger._db.execute("UPDATE tasks SET state = 2 WHERE task_id = ?", (number,))
        row = (number, 1, value, None, 0)
        ledger._db.execute("INSERT INTO results VALUES (?, ?, ?, ?, ?)", row)
    ledger.commit()
    ledger.close()
    names, ids = columns.Names(), range(1, 13)
    with LedgerReader(folder.ledger) as reader:
        rows = [columns.cells_of(folder, row, names) for row in reader.rows_of([*ids])]
        for size in (1, 2, 3, 100):
            monkeypatch.setattr(columns, "_BLOCK", size)
            for column in (columns.Column("metric", "y"), columns.Column("param", "name")):
                read = [*columns.read_cells(folder, reader, column, ids, names)]
                assert repr(read) == repr([row.get(column) for row in rows])
    assert "hf_" not in repr(rows) and len([one for one in rows if one]) == 12


def test_a_word_is_found_in_settings_states_and_keys_but_not_in_secrets(folder: RunFolder) -> None:
    table = TaskTable(folder)
    [first, *_] = table.page(limit=1)["rows"]
    assert table.page(text=f'"{first["key"][2:9]}"')["rows"][0]["key"] == first["key"]
    assert table.page(text="WAITING n2")["total"] == 100
    assert table.page(text="abcdefgh")["total"] == 0


def test_a_password_in_a_value_is_shown_nowhere(folder: RunFolder) -> None:
    add(folder, [{"url": "https://me:open-sesame@host/a"}, {"all": [{"api_key": "open-sesame"}]}])
    table = TaskTable(folder)
    assert cells(table.page(offset=300, limit=1), "url") == ["https://…@host/a"]
    for page in (table.page(offset=300), table.page(sort="url"), table.page(sort="all")):
        assert "sesame" not in str(page)
    assert "sesame" not in str([*table.parts(**EVERY)])


def test_what_was_read_ahead_follows_the_run(folder: RunFolder) -> None:
    table = TaskTable(folder)
    assert table.page(limit=1)["total"] == 300 and not table.is_prepared
    table.prepare()
    assert table.is_prepared
    add(folder, [{"x": 7, "late": "wonder"}])
    assert table.page(text="wonder")["total"] == 1
    assert "late" in [column["key"] for column in table.page(limit=1)["columns"]]


def test_a_run_that_goes_on_is_read_ahead_in_parts(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "_FEW", 50)
    monkeypatch.setattr(tables, "_AHEAD_S", 0.0)
    table = TaskTable(folder)
    for turn in range(6):
        assert not table.is_prepared
        add(folder, [{"x": turn, "late": "wonder"}])  # told by a look, between two parts
        table.refresh()
        if turn == 3:
            table.prepare()  # somebody saves the table meanwhile
            assert table.is_prepared
            break
        table.prepare(at_once=False)
    other = TaskTable(folder)
    turns = 0
    while not other.is_prepared and turns < 100:
        other.prepare(at_once=False)
        turns += 1
    assert turns == 8, "304 tasks, 50 of them at a time, and the end"
    for one in (table, other):
        assert one.page(text="wonder")["total"] == 4
        assert sum(len(part) for part in one.parts(**EVERY)) == 1 + 304


def test_reading_ahead_ends_where_the_run_was_begun_anew_with_fewer_tasks(
    folder: RunFolder,
) -> None:
    table = TaskTable(folder)
    table.refresh()
    remove(folder.ledger)
    add(folder, [{"x": 1, "late": "wonder"}])
    table.prepare()
    assert not table.is_prepared
    table.refresh()
    table.prepare()
    assert table.is_prepared and table.page(text="wonder")["total"] == 1


def test_tables_that_nobody_uses_keep_nothing_when_others_need_the_room(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "_MOST_BYTES", 60_000)
    one, other = TaskTable(folder), TaskTable(folder)
    first = one.page(sort="x", descending=True, limit=9)
    assert one.is_ready
    other.prepare()
    assert other.is_ready and not one.is_ready
    assert one.page(sort="x", descending=True, limit=9) == first


@pytest.mark.parametrize("most", [100, 20_000])
def test_what_is_saved_has_every_column(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """Also where the words of a table were given up, because much has changed or for their size;
    and where the same setting holds other names.
    """
    monkeypatch.setattr(tables, "_CHUNK", most)
    add(folder, [{"opt": {"a": 1}}, {"opt": {"b": 2}}])
    table = TaskTable(folder)
    table.prepare()
    if most > 100:
        monkeypatch.setattr(tables, "_MOST_OF_ONE", 1)
        table.page(sort="x", limit=1)
    add(folder, [{"late": x} for x in range(101)])
    [[names], *parts] = table.parts(**EVERY)
    assert {"opt.a", "opt.b", "late", "x"} <= {*names}
    rows = [row for part in parts for row in part]
    assert len(rows) == 403 and rows[-1][names.index("late")] == 100


def test_a_table_that_is_given_up_while_it_is_saved_is_saved_whole(folder: RunFolder) -> None:
    add(folder, [{"late": x} for x in range(300)])
    table = TaskTable(folder)
    parts = table.parts(**EVERY)
    [names] = next(parts)
    table.forget()
    assert not table.is_ready
    rows = [row for part in parts for row in part]
    assert len(rows) == 600 and rows[-1][names.index("late")] == 299


def test_a_table_that_somebody_uses_is_not_given_up(folder: RunFolder) -> None:
    table = TaskTable(folder)
    with table._asking():
        table.refresh()
        table.forget()
        assert table.is_ready
    table.forget()
    assert not table.is_ready


def test_what_a_table_keeps_is_measured(folder: RunFolder) -> None:
    """Of a text of any length the beginning is kept for a word that is looked for."""
    table = TaskTable(folder)
    table.prepare()
    add(folder, [{"x": 0, "text": f"here {n} {'y' * 100_000}"} for n in range(100)])
    assert table.page(text="here")["total"] == 100
    assert 100_000 < table.num_bytes < 400_000
    table.page(sort="text")
    assert table.num_bytes > 100 * 100_000


def test_a_table_keeps_the_columns_that_were_used_last(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "_MOST_OF_ONE", 45_000)
    table = TaskTable(folder)
    for name in ("x", "name", "task", "number", "device", "x"):
        table.page(sort=name, limit=1)
        assert table.num_bytes <= 60_000
    assert cells(table.page(sort="x", descending=True, limit=1), "x") == [299]
