"""Bytes from Parquet to Parquet: they are never text, and stay where they are if they can."""

from __future__ import annotations

import base64
import hashlib
import io
import os
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.unit.pipeline.chunks_here import Done, run_chunks

from muster.base.atomic_files import sweep
from muster.base.errors import SetupError, UsageError
from muster.pipeline.arrow import batch_of
from muster.pipeline.batch import Row
from muster.pipeline.sinks.formats import SinkSpec
from muster.pipeline.sinks.lines import MARK, RAW
from muster.pipeline.sinks.merge import merge
from muster.pipeline.sinks.parts import Part
from muster.pipeline.sources import files
from muster.pipeline.sources.columnar import Again
from muster.pipeline.sources.files import fingerprint
from muster.pipeline.sources.source import Selection, Source
from muster.pipeline.sources.table import open_input
from muster.pipeline.writing import _encoded

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


@pytest.mark.parametrize("selection", [Selection(), Selection(shuffle_seed=1)])
def test_copies_of_a_large_row_are_kept_in_groups_that_arrow_can_hold(
    tmp_path: Path, selection: Selection
) -> None:
    """Arrow ends at 2 GiB; a group ends long before, however many records a row became."""
    image = os.urandom(3 << 20)
    pq.write_table(pa.table({"n": [0, 1], "image": [image, None]}), tmp_path / "in.parquet")
    source = open_input(tmp_path / "in.parquet", selection, folder=tmp_path / "input")
    done = run_chunks(source, tmp_path, "many_copies", keeps_types=True, keeps_ids=False)
    (part,) = done.parts
    marks = part.rows.read_bytes().count(orjson.dumps(MARK))
    assert marks >= 2
    found = pq.read_table(done.merged(source, tmp_path / "out.parquet")).to_pylist()
    assert sorted((r["n"], r["copy"]) for r in found) == [(n, c) for n in (0, 1) for c in range(25)]
    assert all(r["image"] == (None if r["n"] else image) for r in found)


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


def test_a_large_input_that_was_merely_touched_has_not_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "HASHED_WHOLE", 100)
    source, _ = chunks(tmp_path, "same")
    before = fingerprint(tmp_path / "in.parquet")["hash"]
    os.utime(tmp_path / "in.parquet", ns=(1, 1))
    assert fingerprint(tmp_path / "in.parquet")["hash"] == before
    again = Again(source.files)
    again._opened(0)
    again.check_unchanged()


@pytest.mark.parametrize("is_cut", [True, False])
def test_another_input_is_named_and_not_the_output(tmp_path: Path, is_cut: bool) -> None:
    source, done = chunks(tmp_path, "same")
    path = tmp_path / "in.parquet"
    if is_cut:  # fewer row groups
        pq.write_table(pa.table({"n": [1], "image": [b"x"]}), path)
    else:  # a page is damaged, and the time is as it was
        time, data = path.stat().st_mtime_ns, bytearray(path.read_bytes())
        data[4:400] = bytes(396)
        path.write_bytes(data)
        os.utime(path, ns=(time, time))
    what = "has changed since this run" if is_cut else r"Cannot read the columns of .*in\.parquet"
    with pytest.raises(UsageError, match=what):
        done.merged(source, tmp_path / "out.parquet")


@pytest.mark.parametrize("kind", [pa.string_view(), pa.binary_view()])
def test_rows_of_a_view_can_be_taken(kind: Any) -> None:
    column = pa.array(["a", None, "c"], kind)
    batch = pa.record_batch({"x": column})
    taken = batch_of(batch, [("x", [2, None, 1, 0])]).column("x")
    assert taken.equals(pa.array(["c", None, None, "a"], kind))


def test_only_what_a_killed_write_left_is_swept(tmp_path: Path) -> None:
    kept = [
        ".emb.validation.1a2b3c4d.folder", ".emb.keep-me-please.folder", ".emb.original.tmp",
    ]  # fmt: skip
    for name in (*kept, ".emb.1a2b3c4d.folder", ".emb.1a2b3c4d-old.folder"):
        (tmp_path / name).mkdir()
    (tmp_path / ".emb.00ff3c4d.tmp").touch()
    sweep(tmp_path / "emb")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)


@pytest.mark.parametrize("key", [RAW, MARK])
def test_our_own_keys_are_refused(key: str) -> None:
    row = Row(0, {}, records=[{key: 5, "x": 1}])
    ((_, lines),) = _encoded([row])
    assert lines == [] and "rename it" in row.failures[0].reason
