"""Bytes from Parquet to Parquet: they are never text, and stay where they are if they can."""

from __future__ import annotations

import base64
import hashlib
import io
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.unit.pipeline.chunks_here import Done, run_chunks

from muster.base.errors import SetupError, UsageError
from muster.pipeline.sinks.formats import SinkSpec
from muster.pipeline.sinks.merge import merge
from muster.pipeline.sinks.parts import MARK, Part
from muster.pipeline.sources.source import Selection, Source
from muster.pipeline.sources.table import open_input

SIZE, COUNT = 4000, 23
#: With line ends and quotes in them, as images have them.
IMAGES = [bytes((n * i + 10 * (i % 7 == 0)) % 256 for i in range(SIZE)) for n in range(COUNT)]


def chunks(place: Path, stage: str, selection: Selection | None = None) -> tuple[Source, Done]:
    table = pa.table({"n": range(COUNT), "image": IMAGES})
    pq.write_table(table, place / "in.parquet", row_group_size=7)
    source = open_input(place / "in.parquet", selection or Selection(), folder=place / "input")
    how = {"keeps_types": True, "keeps_ids": False, "batch_size": 4}
    return source, run_chunks(source, place, stage, **how)


def in_chunks(done: Done) -> int:
    return sum(part.num_bytes for part in done.parts)


@pytest.mark.parametrize("stage", ["same", "every_third"])
def test_columns_that_stay_are_left_in_the_input(tmp_path: Path, stage: str) -> None:
    source, done = chunks(tmp_path, stage)
    assert in_chunks(done) < COUNT * SIZE / 10
    found = pq.read_table(done.merged(source, tmp_path / "out.parquet"))
    numbers = list(range(0, COUNT, 3 if stage == "every_third" else 1))
    assert found.to_pydict() == {"n": numbers, "image": [IMAGES[n] for n in numbers]}


@pytest.mark.parametrize(
    ("stage", "selection"),
    [("reversed_bytes", Selection()), ("same", Selection(shuffle_seed=1))],
)
def test_other_bytes_are_stored_as_they_are(
    tmp_path: Path, stage: str, selection: Selection
) -> None:
    source, done = chunks(tmp_path, stage, selection)
    assert COUNT * SIZE < in_chunks(done) < COUNT * SIZE * 1.1 + 5000  # 1.33 as base64
    found = pq.read_table(done.merged(source, tmp_path / "out.parquet"))
    step = -1 if stage == "reversed_bytes" else 1
    assert {r["n"]: r["image"][::step] for r in found.to_pylist()} == dict(enumerate(IMAGES))
    assert found.num_rows == COUNT


def test_an_input_that_has_changed_is_noticed_before_anything_is_published(tmp_path: Path) -> None:
    source, done = chunks(tmp_path, "same")
    pq.write_table(
        pa.table({"n": range(COUNT), "image": IMAGES[::-1]}),
        tmp_path / "in.parquet", row_group_size=7,
    )  # fmt: skip
    with pytest.raises(UsageError, match=r"in\.parquet has changed since this run was started"):
        done.merged(source, tmp_path / "out.parquet")
    (tmp_path / "in.parquet").unlink()
    with pytest.raises(UsageError, match=r"in\.parquet"):
        done.merged(source, tmp_path / "out.parquet")
    assert [path.name for path in tmp_path.iterdir() if "out" in path.name] == []


def one_part(place: Path, data: bytes, num_rows: int) -> Part:
    path = place / "k.jsonl"
    path.write_bytes(data)
    sha256 = hashlib.sha256(data).hexdigest()
    return Part(0, 0, num_rows, path, num_rows, len(data), sha256, None, 0)


def merged(place: Path, part: Part) -> list[dict[str, Any]]:
    sink = SinkSpec(path=place / "out.parquet", format="parquet")
    merge([part], sink, errors=place / "errors.jsonl")
    return pq.read_table(sink.path).to_pylist()


def test_chunks_of_an_earlier_version_are_read(tmp_path: Path) -> None:
    """With an Arrow stream in the first line, and bytes, as base64 text."""
    batch = pa.record_batch({"image": pa.array([b"\x00\n", None], pa.binary())})
    out = io.BytesIO()
    with pa.ipc.new_stream(out, batch.schema) as stream:
        stream.write_batch(batch)
    text = base64.b64encode(out.getvalue()).decode()
    made = {MARK: "bytes", "value": base64.b64encode(b"\xff\n").decode()}
    first = {MARK: [text, ["image", "n", "made"]], "n": 1, "made": made}
    data = b"".join(orjson.dumps(line) + b"\n" for line in (first, {"n": 2}))
    assert merged(tmp_path, one_part(tmp_path, data, 2)) == [
        {"image": b"\x00\n", "n": 1, "made": b"\xff\n"},
        {"image": None, "n": 2, "made": None},
    ]


def test_damaged_bytes_are_noticed(tmp_path: Path) -> None:
    source, done = chunks(tmp_path, "reversed_bytes")
    part = done.parts[0]
    whole = part.rows.read_bytes()
    at = whole.index(b"\n") + SIZE // 2
    begin = whole.index(b":") + 1
    for damaged in (
        whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :],  # a bit behind the line
        whole[:begin] + b"9" * 15 + whole[begin:],  # more bytes than memory holds
        whole[:begin] + b"1" + whole[begin + 1 :],  # fewer than there are
        whole[:-100],
    ):
        part.rows.write_bytes(damaged)
        with pytest.raises(SetupError, match="damaged"):
            done.merged(source, tmp_path / "out.parquet")
    part.rows.write_bytes(whole)
    assert done.merged(source, tmp_path / "out.parquet").exists()
