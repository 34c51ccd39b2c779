"""Parts as workers leave them, and records to put into them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import orjson
from hypothesis import strategies as st

from muster.pipeline.sinks.parts import Part

Rows = list[dict[str, Any]]

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | text
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=5,
)
records = st.dictionaries(st.sampled_from("abcd") | text, values, max_size=5)
#: Shards of parts of records.
cuts = st.lists(
    st.lists(st.lists(records, max_size=4), min_size=1, max_size=3), min_size=1, max_size=4
)


def lines(rows: Rows) -> bytes:
    return b"".join(orjson.dumps(row) + b"\n" for row in rows)


def part(folder: Path, order: int, start: int, rows: Rows, bad: Rows | None = None) -> Part:
    """A part of ``len(rows) + len(bad)`` rows, at least one."""
    path = folder / f"{order}-{start}.jsonl"
    data = lines(rows)
    path.write_bytes(data)
    errors = None
    if bad:
        errors = path.with_suffix(".errors.jsonl")
        errors.write_bytes(lines(bad))
    return Part(
        order=order,
        start=start,
        stop=start + max(1, len(rows) + len(bad or [])),
        rows=path,
        num_rows=len(rows),
        num_bytes=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        errors=errors,
        num_errors=len(bad or []),
    )


def parts_of(folder: Path, shards: list[list[Rows]]) -> list[Part]:
    folder.mkdir(exist_ok=True)
    made = []
    for order, shard in enumerate(shards):
        start = 0
        for rows in shard:
            made.append(part(folder, order, start, rows))
            start = made[-1].stop
    return made


def flat(shards: list[list[Rows]]) -> Rows:
    return [row for shard in shards for rows in shard for row in rows]
