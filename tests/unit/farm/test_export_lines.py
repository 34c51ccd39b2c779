"""Numbers of commands that JSON lacks, in the lines of an export."""

from __future__ import annotations

import json
from pathlib import Path

from muster.farm.canonical import payload_and_key
from muster.farm.export import export
from muster.farm.ledger.store import Ledger
from muster.farm.task import NewTask
from muster.run.folder import RunFolder

COMMAND = "python t.py --id {id}"


def test_a_text_that_becomes_a_number_which_json_lacks_is_written_as_what_it_is(
    tmp_path: Path,
) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    ledger = Ledger(folder.ledger)
    ledger.begin()
    number = ledger.target_id(COMMAND)
    found = [payload_and_key(COMMAND)({"id": id}) for id in ("1" * 30, "1e999", "7")]
    ledger.add_tasks(NewTask(key, number, payload) for payload, key in found)
    ledger.commit()
    ledger.close()
    assert export(folder, tmp_path / "t.jsonl") == 3
    lines = (tmp_path / "t.jsonl").read_text().splitlines()
    assert [json.loads(line)["id"] for line in lines] == [
        {"$int": hex(int("1" * 30))},
        {"$float": "inf"},
        7,
    ]
