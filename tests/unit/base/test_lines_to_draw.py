"""What is read of a training's lines to draw them."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

from muster.base.journal import lines_to_draw


def write(path: Path, num_steps: int) -> None:
    with path.open("w") as file:
        for step in range(1, num_steps + 1):
            file.write(json.dumps({"kind": "train", "step": step}) + "\n")
            if step % 1000 == 0:
                file.write(json.dumps({"kind": "evaluation", "step": step}) + "\n")
        file.write('{"step": 1, "logged": 2}\n{"kind": "tra')


def test_all_steps_are_drawn_up_to_some_thousand(tmp_path: Path) -> None:
    write(path := tmp_path / "metrics.jsonl", 15_999)
    lines = lines_to_draw(path)
    assert [line["step"] for line in lines[:15_999]] == [*range(1, 16_000)]
    assert [line["step"] for line in lines[15_999:]] == [*range(1000, 16_000, 1000)]
    assert lines_to_draw(tmp_path / "missing.jsonl") == []


def test_of_more_steps_as_many_are_held_however_many_there_are(tmp_path: Path) -> None:
    write(path := tmp_path / "metrics.jsonl", 150_001)
    lines = lines_to_draw(path)
    steps = [line["step"] for line in lines if line["kind"] == "train"]
    assert 8_000 <= len(steps) <= 16_001 and steps[0] == 1 and steps[-1] == 150_001
    gaps = [after - before for before, after in pairwise(steps)]
    assert gaps.count(1) >= len(steps) // 2, "speeds are those of steps that follow each other"
    assert max(gaps) < 100, "they are evenly spread"
    assert sum(line["kind"] == "evaluation" for line in lines) == 150
