"""What a failed call has put on the device is free again before anything else is called."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.programs.typed_stages import Block
from tests.unit.pipeline.chunks_here import run_chunks

from muster.pipeline.batch import Row, Step, apply
from muster.pipeline.sources.source import Selection
from muster.pipeline.sources.table import open_input


def test_a_batch_that_does_not_fit_comes_out_whole_in_pieces(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("".join(f'{{"n": {n}}}\n' for n in range(16)))
    source = open_input(str(tmp_path / "in.jsonl"), Selection(), folder=tmp_path)
    done = run_chunks(source, tmp_path, "Cramped", rows_per_chunk=16)
    assert [result["rejected"] for result in done.results] == [0]
    made = [json.loads(line) for line in done.parts[0].rows.read_text().splitlines()]
    assert [record["n"] for record in made] == [*range(16)]
    assert max(record["held"] for record in made) == 60 + 8 * 4


@pytest.mark.parametrize("is_batched", [False, True])
def test_a_record_is_tried_again_after_the_failed_try_has_let_go(is_batched: bool) -> None:
    calls = []

    def flaky(record: dict[str, Any]) -> dict[str, Any]:
        activations = Block(60)
        calls.append(record)
        if len(calls) == 1:
            raise ValueError(f"not the first time, with {activations.size} units taken")
        return record

    step = Step("flaky", one=flaky, retries=1)
    if is_batched:
        step = Step("flaky", many=lambda batch: [flaky(record) for record in batch], retries=1)
    rows = [Row(0, 0, [{"id": 0}])]
    apply(step, rows, keeps_ids=True)
    assert rows[0].failures == []
    assert rows[0].records == [{"id": 0}]
