"""What is opened: compressed files, iterables, data sets; what is refused; what is found again."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import random
import re
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from tests.conftest import MusterCli

from muster.base.errors import UnknownNameError, UsageError
from muster.pipeline.sources.files import find_files, fingerprint, spool_stream
from muster.pipeline.sources.source import Selection
from muster.pipeline.sources.table import (
    InputOptions,
    changes,
    identity,
    open_input,
    reopen,
)

ROWS = [{"n": n, "text": "x" * (n % 7)} for n in range(300)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def read_all(source: Any, rows: int | None = 7) -> list[Any]:
    again = reopen(json.loads(json.dumps(source.describe())))
    return [row for shard in source.shards(rows) for _, row in again.read(shard, 0, shard.count)]


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_a_compressed_file_is_unpacked_once(tmp_path: Path, suffix: str) -> None:
    path, folder = tmp_path / f"data.jsonl.{suffix}", tmp_path / "input"
    pack = gzip.compress if suffix == "gz" else zstandard.ZstdCompressor().compress
    path.write_bytes(pack(LINES[:900]) + pack(LINES[900:]))
    source = open_input(path, Selection(), folder=folder)
    assert read_all(source) == ROWS
    [unpacked] = folder.glob("data-*.jsonl")
    before = unpacked.stat()
    open_input(path, Selection(), folder=folder)
    assert unpacked.stat().st_ino == before.st_ino
    path.write_bytes(pack(LINES[:900]))
    assert len(read_all(open_input(path, Selection(), folder=folder))) < 300
    elsewhere = open_input(path, Selection(), folder=tmp_path / "other").describe()
    here = open_input(path, Selection(), folder=folder).describe()
    assert identity(here) == identity(elsewhere)
    assert changes(source.describe(), here)
    path.write_bytes(pack(LINES)[:-9])
    with pytest.raises(UsageError, match=r"Cannot unpack .*: "):
        open_input(path, Selection(), folder=folder)
    assert not list(folder.glob(".*tmp"))


def test_an_iterator_is_written_once_and_only_as_far_as_needed(tmp_path: Path) -> None:
    source = open_input(iter(ROWS), Selection(), folder=tmp_path)
    assert read_all(source) == ROWS
    endless = ({"n": n} for n in itertools.count())
    source = open_input(endless, Selection(skip=3, limit=4), folder=tmp_path)
    assert [row["n"] for row in read_all(source)] == [3, 4, 5, 6]
    assert next(endless) == {"n": 7}
    with pytest.raises(UsageError, match="record 1 of the input is not a record but of type int"):
        open_input([{"n": 1}, 5], Selection(), folder=tmp_path)
    with pytest.raises(UsageError, match="record 0 of the input cannot be kept as JSON"):
        open_input([{"n": b"bytes"}], Selection(), folder=tmp_path)


def test_a_stream_that_broke_goes_on_where_it_was(tmp_path: Path) -> None:
    begun_at = []

    def open_at(number: int) -> Any:
        begun_at.append(number)
        for row in ROWS[number:]:
            if len(begun_at) == 1 and row["n"] == 100:
                raise ConnectionError("gone")
            yield row

    target = tmp_path / "stream.jsonl"
    with pytest.raises(ConnectionError):
        spool_stream(open_at, target, None, "hf:x")
    assert not target.exists()
    with target.with_suffix(".partial").open("ab") as file:
        file.write(b'{"n": 10')
    for _ in range(2):
        spool_stream(open_at, target, None, "hf:x")
        assert [json.loads(line) for line in target.read_text().splitlines()] == ROWS
    assert begun_at == [0, 100]


# ------------------------------------------------------------------ Hugging Face, local data only


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    import datasets

    datasets.disable_progress_bars()
    parts = {"train": ROWS, "test": ROWS[:20]}
    folder = tmp_path / "stored"
    splits = {name: datasets.Dataset.from_list(rows) for name, rows in parts.items()}
    datasets.DatasetDict(splits).save_to_disk(folder, num_shards={"train": 3, "test": 1})
    return folder


@pytest.mark.parametrize("streaming", [False, True])
def test_a_hugging_face_data_set(tmp_path: Path, stored: Path, streaming: bool) -> None:
    options = InputOptions(split="train", streaming=streaming)
    source = open_input(f"hf:{stored}", Selection(), options, tmp_path / "input")
    assert read_all(source) == ROWS
    assert source.describe()["columns"] == ["n", "text"]
    some = Selection(skip=95, limit=20, where=("n > 100",))
    found = read_all(open_input(f"hf:{stored}", some, options, tmp_path / "input"))
    assert found == [None] * 6 + ROWS[101:115]
    mixed = Selection(shuffle_seed=1)
    found = read_all(open_input(f"hf:{stored}", mixed, options, tmp_path / "input"))
    assert found != ROWS
    assert sorted(row["n"] for row in found) == list(range(300))


def test_splits_of_a_data_set(tmp_path: Path, stored: Path) -> None:
    with pytest.raises(UsageError, match=r"has 2 splits: train, test\.\nHint: choose one"):
        open_input(f"hf:{stored}", Selection(), folder=tmp_path)
    with pytest.raises(UnknownNameError, match=r"Unknown split .*'trian'"):
        open_input(f"hf:{stored}", Selection(), InputOptions(split="trian"), tmp_path)
    with pytest.raises(UsageError, match=r"--split has no effect on data\.jsonl"):
        open_input("data.jsonl", Selection(), InputOptions(split="train"), tmp_path)


def test_a_local_folder_through_load_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    datasets.disable_progress_bars()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "data"
    folder.mkdir()
    pq.write_table(pa.Table.from_pylist(ROWS), folder / "train.parquet")
    source = open_input(f"hf:{folder}", Selection(limit=30), folder=tmp_path / "input")
    assert read_all(source) == ROWS[:30]


# ------------------------------------------------------------------ refused


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.jsonl", b"", "There are no records in .*a.jsonl: it is empty"),
        ("a.csv", b"", "it is empty"),
        ("a.csv", b"a,b,a\n1,2,3\n", "The header of a.csv names 'a' twice"),
        ("a.csv", b"a,\xff\n", "The header of a.csv cannot be read: not UTF-8"),
        ("a.txt", b"x", "Cannot tell what .*a.txt is from its name"),
        ("a.jsonl", '{"a": 1}'.encode("utf-16"), "a.jsonl is UTF-16.\nHint: say --encoding utf-16"),
        ("a.jsonl", gzip.compress(b"{}\n", mtime=0), "a.jsonl is gzip data"),
        ("a.json", b"[\n{}]", "a.json is one JSON value over several lines"),
        ("a.json", b'{\n "a": 1}', "a.json is one JSON value over several lines"),
        ("a.parquet", b"no", "a.parquet is not a Parquet file"),
        ("a.parquet", b"PAR1 but no footer", "Cannot read a.parquet as Parquet"),
    ],
)
def test_what_cannot_be_read_is_refused_at_once(
    tmp_path: Path, name: str, data: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UsageError, match=message):
        open_input(tmp_path / name, Selection(), folder=tmp_path / "input")


def test_paths_that_name_nothing_or_too_much(tmp_path: Path) -> None:
    def refused(what: Path, message: str) -> None:
        with pytest.raises(UsageError, match=message):
            open_input(what, Selection(), folder=tmp_path / "input")

    refused(tmp_path / "no.jsonl", "There is no file or folder .*no.jsonl")
    refused(tmp_path / "*.jsonl", r"No file matches .*\*.jsonl")
    (tmp_path / "data").mkdir()
    refused(tmp_path / "data", "holds no data files")
    (tmp_path / "data" / "a.jsonl").write_text("{}\n")
    (tmp_path / "data" / "a.csv").write_text("a\n")
    refused(tmp_path / "data", "mixes kinds of files: csv, jsonl")
    with pytest.raises(UsageError, match=r"There are no rows in a.csv"):
        list(open_input(tmp_path / "data/a.csv", Selection(), folder=tmp_path).shards(None))
    with pytest.raises(UsageError, match="--skip -1 is negative"):
        open_input(tmp_path / "data/a.csv", Selection(skip=-1), folder=tmp_path)


# ------------------------------------------------------------------ found again


def test_changes_are_named_and_a_touch_is_none(tmp_path: Path) -> None:
    path, folder = tmp_path / "data.jsonl", tmp_path / "input"

    def described(**selection: Any) -> Any:
        return json.loads(
            json.dumps(open_input(path, Selection(**selection), folder=folder).describe())
        )

    path.write_bytes(LINES)
    before = described()
    os.utime(path, (1, 1))
    assert changes(before, described()) == []
    assert identity(before) == identity(described())
    assert changes(before, described(limit=3)) == ["limit: None -> 3"]
    path.write_bytes(LINES.replace(b'"n": 17,', b'"n": 18,'))
    assert changes(before, described()) == ["data.jsonl: other content of the same size"]
    path.write_bytes(LINES * 2)
    assert changes(before, described()) == ["data.jsonl: size 7.69 kB -> 15.4 kB"]
    left = changes(before, {**before, "files": []})
    assert left == ["data.jsonl: is there, but not in the input any more"]
    path.unlink()
    assert changes(before, {**before, "files": []}) == ["data.jsonl: is gone"]


def test_a_worker_refuses_a_file_that_has_changed(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(LINES)
    described = open_input(path, Selection(), folder=tmp_path / "input").describe()
    path.write_bytes(b"{}\n" + LINES)
    with pytest.raises(UsageError, match=r"data.jsonl has changed since .*: 7,687 -> 7,690 bytes"):
        reopen(described)
    path.unlink()
    with pytest.raises(UsageError, match=r"data.jsonl is gone since the run began"):
        reopen(described)


@pytest.mark.parametrize("is_of_0_1_0", [False, True])  # which had the time in all such hashes
@pytest.mark.parametrize(
    ("name", "size_mib"),
    [
        ("a.jsonl", 0),
        ("a.jsonl", 65),
        pytest.param("a.parquet", 65, marks=pytest.mark.thorough),
    ],
)
def test_a_worker_refuses_another_file_of_the_same_size_and_takes_a_copy(
    tmp_path: Path, name: str, size_mib: int, is_of_0_1_0: bool
) -> None:
    """As on a host that has a file of its own at that place; a copy there has another time."""
    path = tmp_path / name
    _write_large(path, size_mib, b"x")  # above 64 MiB samples stand for a file
    os.utime(path, ns=(0, 0))
    described = open_input(path, Selection(), folder=tmp_path / "input").describe()
    if is_of_0_1_0:
        [file] = described["files"]
        file.update(fingerprint(path, always_timed=True))
    os.utime(path, ns=(1, 1))
    assert list(reopen(described).describe()["columns"]) == described["columns"]
    _write_large(path, size_mib, b"y")
    with pytest.raises(UsageError, match=rf"{name} on .* has other content than when the run"):
        reopen(described)


def _write_large(path: Path, size_mib: int, letter: bytes) -> None:
    if path.suffix == ".parquet":
        table = pa.table({"data": [letter * (size_mib << 20)]})
        pq.write_table(
            table, path, compression="none", use_dictionary=False, write_statistics=False
        )
    else:
        path.write_bytes(LINES.replace(b"x", letter) + b" " * (size_mib << 20) + b"\n")


def test_a_second_start_finds_the_index(tmp_path: Path) -> None:
    path, folder = tmp_path / "data.jsonl", tmp_path / "input"
    path.write_bytes(LINES)
    shards = list(open_input(path, Selection(), folder=folder).shards(9))
    again = open_input(path, Selection(), folder=folder)
    path.unlink()  # nothing is scanned any more
    assert list(again.shards(9)) == shards


def test_a_limit_scans_no_more_than_it_needs(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    with path.open("wb") as file:
        file.write(b"{}\n" * 2000)
        file.truncate(1 << 40)
    source = open_input(path, Selection(limit=50), folder=tmp_path / "input")
    assert read_all(source, 20) == [{}] * 50


def test_memory_does_not_grow_with_the_input(tmp_path: Path) -> None:
    peaks = []
    for num_rows in (20_000, 20_000, 200_000):
        path = tmp_path / f"{num_rows}.jsonl"
        line = json.dumps({"text": "x" * 180}).encode() + b"\n"
        path.write_bytes(line * num_rows)
        tracemalloc.start()
        source = open_input(path, Selection(), folder=tmp_path / str(random.random()))
        count = sum(1 for s in source.shards(None) for _ in source.read(s, 0, s.count))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert count == num_rows
    assert peaks[2] < 1.1 * peaks[1]


@pytest.fixture
def among_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Runs a, b and c in a folder beside data, and a file ``run.json`` that is somebody's own."""
    for name in ("runs/a", "runs/deep/b/logs", "runs/c", "data", "_tool", ".git"):
        (tmp_path / name).mkdir(parents=True)
        place = tmp_path / name.removesuffix("/logs")
        (place / "metrics.jsonl").write_text("{}\n")
    (tmp_path / "runs" / "a" / "ledger.sqlite").touch()
    (tmp_path / "runs" / "deep" / "b" / "run.json").write_text("{}")
    (tmp_path / "runs" / "c" / "experiment.json").write_text("{}")
    (tmp_path / "data" / "run.json").write_text("{}\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("named", "found", "left_out"),
    [
        (".", ["data/metrics.jsonl", "data/run.json"], "3 folders of runs"),
        ("runs/a", ["runs/a/metrics.jsonl"], ""),
        ("runs/a/metrics.jsonl", ["runs/a/metrics.jsonl"], ""),
        ("**/*.jsonl", ["_tool/metrics.jsonl", "data/metrics.jsonl"], "3 files in folders of runs"),
        ("{}/**/*.jsonl", ["_tool/metrics.jsonl", "data/metrics.jsonl"], "3 files in folders of"),
        ("**/metrics.jsonl", ["_tool/metrics.jsonl", "data/metrics.jsonl"], "3 files in folders"),
        ("data/*.jsonl", ["data/metrics.jsonl"], ""),
        ("runs/a/*.jsonl", ["runs/a/metrics.jsonl"], ""),
        ("runs/a/**/*.jsonl", ["runs/a/metrics.jsonl"], ""),
        ("runs/*/metrics.jsonl", ["runs/a/metrics.jsonl", "runs/c/metrics.jsonl"], ""),
        ("runs/*/*.jsonl", [], "2 files in folders of runs"),
        ("runs", [], "3 folders of runs"),
    ],
)
def test_runs_are_read_where_they_are_named_and_not_by_the_way(
    among_runs: Path, named: str, found: list[str], left_out: str
) -> None:
    named = named.format(among_runs)
    if not found:
        with pytest.raises(UsageError, match=f"{re.escape(named)}.*, beside {left_out}"):
            find_files(named)
        return
    files, said = find_files(named)
    assert [item.path.relative_to(among_runs).as_posix() for item in files] == found
    assert said.startswith(left_out) and bool(said) == bool(left_out)


def test_what_an_earlier_start_has_read_is_read_again(among_runs: Path) -> None:
    known = {str(among_runs / "runs" / "a" / "metrics.jsonl"), str(among_runs / "gone.jsonl")}
    for named in (".", "**/*.jsonl", str(among_runs)):
        files, _ = find_files(named, known)
        found = {item.path.absolute().relative_to(among_runs).as_posix() for item in files}
        assert "runs/a/metrics.jsonl" in found and "runs/c/metrics.jsonl" not in found, named
        assert "gone.jsonl" not in found
    assert len(find_files("data/*.jsonl", known)[0]) == 1, "what is not named is not read"


@pytest.mark.thorough
def test_what_is_left_out_is_said(among_runs: Path, muster_main: MusterCli) -> None:
    (among_runs / "s.py").write_text("def same(record):\n    return record\n")
    words = ("map", "s.py:same", "--input", "**/*.jsonl", "--output", "out.csv", "--on", "inline")
    done = muster_main(*words, "--dry-run")
    assert "left out 3 files in folders of runs\n" in done.stdout, done.stderr
    done = muster_main(*words)
    assert "**/*.jsonl is read without 3 files in folders of runs; name one" in done.stderr
    assert "2 records in" in done.stdout
