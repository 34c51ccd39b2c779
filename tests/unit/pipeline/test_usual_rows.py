"""Most rows of a batch go through it together; what a row gives must not depend on that."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.unit.pipeline.chunks_here import Done, run_chunks

from muster.pipeline.sources.source import Selection
from muster.pipeline.sources.table import open_input

#: What a line of the input is, or what the stage makes of it.
UNUSUAL = (
    "new", "own id", "bytes", "mark", "none", "two", "wrong", "raise", "blank", "no json",
    "no record", "has an id", "long number",
)  # fmt: skip

ROWS = 10


def line(n: int, kind: str) -> str:
    match kind:
        case "blank":
            return "\n"
        case "no json":
            return "{\n"
        case "no record":
            return "[1]\n"
        case "has an id":
            return json.dumps({"n": n, "id": f"mine {n}"}) + "\n"
        case "long number":
            return f'{{"n": {n}, "long": 123456789012345678901234567890}}\n'
    return json.dumps({"n": n, "kind": kind}) + "\n"


def mapped(place: Path, kinds: Sequence[str], *, batch_size: int, **how: Any) -> Done:
    place.mkdir()
    path = place / "in.jsonl"
    path.write_text("".join(line(n, kind) for n, kind in enumerate(kinds)))
    source = open_input(str(path), Selection(), folder=place)
    return run_chunks(
        source, place, "by_kind", rows_per_chunk=ROWS, batch_size=batch_size, keep_going=True, **how
    )


def written(done: Done) -> tuple[bytes, list[dict[str, Any]]]:
    """All lines, and the rejected rows, without the tracebacks."""
    rejects = [
        {name: value for name, value in json.loads(text).items() if name != "traceback"}
        for part in done.parts
        if part.errors is not None
        for text in part.errors.read_text().splitlines()
    ]
    return b"".join(part.rows.read_bytes() for part in done.parts), rejects


@pytest.mark.parametrize("keeps_types, keeps_ids", [(True, True), (False, True), (False, False)])
def test_an_unusual_row_and_those_around_it_give_what_each_gives_alone(
    tmp_path: Path, keeps_types: bool, keeps_ids: bool
) -> None:
    kinds = ["same"] * (ROWS * len(UNUSUAL))
    for number, kind in enumerate(UNUSUAL):
        kinds[number * ROWS + 3] = kinds[number * ROWS + ROWS - 1] = kind
    how = {"keeps_types": keeps_types, "keeps_ids": keeps_ids}
    alone = mapped(tmp_path / "alone", kinds, batch_size=1, **how)
    together = mapped(tmp_path / "together", kinds, batch_size=6, **how)
    assert written(together) == written(alone)
    assert together.results == [
        {**other, "errors_bytes": one["errors_bytes"]}
        for one, other in zip(together.results, alone.results, strict=True)
    ]
    for kind, result in zip(UNUSUAL, together.results, strict=True):
        is_rejected = kind in ("mark", "wrong", "raise", "no json", "no record")
        assert result["rejected"] == 2 * is_rejected, kind
    lines, _ = written(together)
    # Bytes that JSON does not know lie between two lines.
    usual = [json.loads(text) for text in re.findall(rb'\{[^{]*"kind":"same"\}', lines)]
    assert [record["n"] for record in usual] == [
        n for n, kind in enumerate(kinds) if kind == "same"
    ]
    own = [record["n"] if keeps_ids else None for record in usual]
    assert [record.get("id") for record in usual] == own
