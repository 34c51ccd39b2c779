"""Parts that are written while others are made: the same file, or none and a merge of all."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples
from tests.unit.pipeline.sinks.sink_parts import Rows, cuts, flat, lines, part, parts_of

from muster.base.atomic_files import sweep
from muster.base.errors import MusterError, SetupError, UsageError
from muster.pipeline.sinks import parts_ahead
from muster.pipeline.sinks.formats import SinkSpec, spec_of
from muster.pipeline.sinks.merge import merge, write_the_output
from muster.pipeline.sinks.parts import Part
from muster.pipeline.sinks.parts_ahead import Ahead, ahead_of, serves, write_as_they_come


def jsonl(folder: Path) -> SinkSpec:
    return spec_of(str(folder / "out.jsonl"))


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_only_files_whose_parts_follow_each_other_are_written_ahead() -> None:
    outputs = ("o.jsonl", "o.parquet", "o.csv", "o/")
    assert [serves(spec_of(name)) for name in outputs] == [True, True, False, False]


# ---------------------------------------------------------------------- JSON lines


@examples(40)
@given(cuts, st.data())
def test_parts_copied_ahead_give_the_same_file_in_whatever_order_they_become_ready(
    tmp_path_factory: pytest.TempPathFactory, shards: list[list[Rows]], data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("merge")
    parts = parts_of(folder / "parts", shards)
    ready = data.draw(st.permutations(parts))[: data.draw(st.integers(0, len(parts)))]
    ahead = Ahead(jsonl(folder), [rows_of_shard(parts, order) for order in range(len(shards))])
    seen: list[Part] = []
    for one in ready:
        seen = sorted([*seen, one])
        for found in seen:  # as a look at the ledger gives them
            ahead.add(found)
    assert not (folder / "out.jsonl").exists()
    if not ahead.has_begun:
        (folder / ".out.jsonl.12345678.tmp").write_text("half")  # what a kill has left
    merged = merge(parts, jsonl(folder), errors=folder / "errors.jsonl", ahead=ahead)
    ahead.discard()
    assert (folder / "out.jsonl").read_bytes() == lines(flat(shards))
    assert merged.num_bytes == len(lines(flat(shards)))
    assert names(folder) == {"parts", "out.jsonl"}


def rows_of_shard(parts: list[Part], order: int) -> int:
    return max(one.stop for one in parts if one.order == order)


def test_a_file_that_another_map_has_swept_is_not_published(tmp_path: Path) -> None:
    class Swept(Ahead):
        def _is_moved(self, temporary: Path, size: int) -> bool:
            is_moved = super()._is_moved(temporary, size)
            sweep(tmp_path / "out.jsonl")
            return is_moved

    parts = parts_of(tmp_path / "parts", [[[{"a": n}] * 3] for n in range(4)])
    ahead = Swept(jsonl(tmp_path), [3] * 4)
    assert ahead.add(parts[0])
    with pytest.raises(SetupError, match="bytes were written where"):
        merge(parts, jsonl(tmp_path), errors=tmp_path / "errors.jsonl", ahead=ahead)
    assert names(tmp_path) == {"parts"}


# ---------------------------------------------------------------------- both


@pytest.fixture(params=["out.jsonl", "out.parquet"])
def spec(request: pytest.FixtureRequest, tmp_path: Path) -> SinkSpec:
    return spec_of(str(tmp_path / request.param))


@pytest.fixture
def four(tmp_path: Path) -> list[Part]:
    return parts_of(tmp_path / "parts", [[[{"a": n}] * 3] for n in range(4)])


def merged_alone(parts: list[Part], spec: SinkSpec) -> bytes:
    """The output as it is without anything written ahead."""
    merge(parts, spec, errors=spec.path.parent / "errors.jsonl")
    data = spec.path.read_bytes()
    spec.path.unlink()
    return data


def file_of(spec: SinkSpec) -> Path:
    """What is written ahead."""
    [path] = spec.path.parent.glob(f".{spec.path.name}.*.tmp")
    return path


_BEFORE: set[psutil.Process] = set()


@pytest.fixture(autouse=True)
def _note_children() -> None:
    """Tests of other files may have left some, such as multiprocessing's."""
    _BEFORE.clear()
    _BEFORE.update(psutil.Process().children())


def writers() -> list[psutil.Process]:
    """The processes that write ahead. Not by their words, which a process has a moment later."""
    return [one for one in psutil.Process().children() if one not in _BEFORE]


def process_at(spec: SinkSpec) -> psutil.Process:
    """The process that has the file open."""
    for _ in range(1200):
        for child in writers():
            if str(file_of(spec)) in [file.path for file in child.open_files()]:
                return child
        time.sleep(0.05)
    raise AssertionError("nobody writes")


@pytest.mark.parametrize("num_ahead", [0, 1, 3, 4])
def test_a_part_of_it_or_all_may_be_written_ahead(
    spec: SinkSpec, four: list[Part], num_ahead: int
) -> None:
    expected = merged_alone(four, spec)
    ahead = ahead_of(spec, [3] * 4)
    assert all(map(ahead.add, four[:num_ahead]))
    assert not any(map(ahead.add, four[:num_ahead]))  # they are there
    assert not spec.path.exists()
    merged = merge(four, spec, errors=spec.path.parent / "errors.jsonl", ahead=ahead)
    ahead.discard()
    assert spec.path.read_bytes() == expected
    assert (merged.num_rows, merged.num_bytes) == (12, len(expected))
    assert names(spec.path.parent) == {"parts", spec.path.name}
    assert not writers()


@pytest.mark.parametrize("what", ["torn", "gone", "of other chunks", "of another schema"])
def test_what_was_written_ahead_counts_only_when_it_is_whole(
    tmp_path: Path, spec: SinkSpec, four: list[Part], what: str
) -> None:
    ahead = ahead_of(spec, [3] * 4)
    for one in four[:2]:
        assert ahead.add(one)
    assert not ahead.add(four[3])  # not its turn
    wanted = spec
    copied = file_of(spec)
    if what == "torn":
        os.truncate(copied, 10)  # Parquet is written over it
    elif what == "gone":
        copied.unlink()
    elif what == "of other chunks":
        four[1] = part(tmp_path / "parts", 1, 0, [{"b": 1}] * 3)
    else:
        wanted = SinkSpec(path=spec.path, format=spec.format, columns=(("a", "float32"),))
    merge(four, wanted, errors=tmp_path / "errors.jsonl", ahead=ahead)
    ahead.discard()
    found = spec.path.read_bytes()
    spec.path.unlink()
    assert found == merged_alone(four, wanted)
    assert names(tmp_path) == {"parts"}


@pytest.mark.parametrize("what", ["short disk", "later short disk", "fsync"])
def test_a_failure_ahead_leaves_no_file_and_the_merge_makes_it_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: SinkSpec, four: list[Part], what: str
) -> None:
    ahead = ahead_of(spec, [3] * 4)
    assert ahead.add(four[0])
    with monkeypatch.context() as patch, pytest.raises(SetupError):
        if "short disk" in what:
            usage = shutil.disk_usage(tmp_path)._replace(free=(1 << 30) - 1)
            patch.setattr(shutil, "disk_usage", lambda path: usage)
        else:
            patch.setattr(os, "fsync", failing)
        if what != "short disk":
            ahead.sync()
        ahead.add(four[1])
    assert names(tmp_path) == {"parts"}
    assert not writers()
    assert not any(map(ahead.add, four))
    merge(four, spec, errors=tmp_path / "errors.jsonl", ahead=ahead)
    found = spec.path.read_bytes()
    spec.path.unlink()
    assert found == merged_alone(four, spec)


@pytest.mark.parametrize("what", ["parts", "what is left of the input"])
def test_the_disk_has_to_have_room_for_a_copy_of_what_is_there_and_the_next_part(
    monkeypatch: pytest.MonkeyPatch, spec: SinkSpec, four: list[Part], what: str
) -> None:
    monkeypatch.setattr(parts_ahead, "_RESERVE_BYTES", 1)
    ahead = ahead_of(spec, [3] * 4)
    assert ahead.add(four[0])
    written, usage = four[0].num_bytes, shutil.disk_usage(spec.path.parent)
    if what != "parts":  # which the file has beside them
        os.truncate(file_of(spec), written := 9999)
    for number, one in enumerate(four[1:3]):
        free = written + one.num_bytes - number
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "disk_usage", lambda path, free=free: usage._replace(free=free))
            if number == 0:
                assert ahead.add(one)
                written = max(written, 2 * one.num_bytes)
                if what != "parts" and spec.format == "jsonl":
                    written = 9999 + one.num_bytes  # it is added to
            else:
                with pytest.raises(SetupError, match="No space left"):
                    ahead.add(one)
    assert not list(spec.path.parent.glob(f".{spec.path.name}.*.tmp"))


def failing(handle: int) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_chunk_that_is_damaged_while_it_is_written_ahead_is_read_again(
    tmp_path: Path, spec: SinkSpec, four: list[Part]
) -> None:
    ahead = ahead_of(spec, [3] * 4)
    whole = four[0].rows.read_bytes()
    four[0].rows.write_bytes(b'{"a":7}\n' + whole[8:])
    with pytest.raises(SetupError, match="is damaged"):  # of Parquet the process finds it
        ahead.add(four[0])
        merge(four, spec, errors=tmp_path / "errors.jsonl", ahead=ahead)
    assert names(tmp_path) == {"parts"}
    four[0].rows.write_bytes(whole)
    merge(four, spec, errors=tmp_path / "errors.jsonl", ahead=ahead)
    ahead.discard()
    assert merged_alone(four, spec)


# ---------------------------------------------------------------------- Parquet


@pytest.mark.parametrize("when", ["before it is told", "while it waits"])
def test_a_process_that_is_killed_costs_no_more_than_its_work(
    tmp_path: Path, four: list[Part], when: str
) -> None:
    spec = spec_of(str(tmp_path / "out.parquet"))
    ahead = ahead_of(spec, [3] * 4)
    if when == "while it waits":
        assert ahead.add(four[0])
        process_at(spec).kill()
    else:
        [process] = writers()
        process.kill()
        ahead.add(four[0])
    merge(four, spec, errors=tmp_path / "errors.jsonl", ahead=ahead)
    ahead.discard()
    assert pq.read_table(spec.path).to_pydict() == {"a": [n // 3 for n in range(12)]}
    assert names(tmp_path) == {"parts", "out.parquet"}


def test_what_is_discarded_leaves_neither_a_process_nor_a_file(
    tmp_path: Path, four: list[Part]
) -> None:
    spec = spec_of(str(tmp_path / "out.parquet"))
    ahead = ahead_of(spec, [3] * 4)
    assert ahead.add(four[0])
    process_at(spec)
    ahead.discard()
    assert not writers()
    assert names(tmp_path) == {"parts"}


@examples(60)
@given(cuts)
def test_parquet_of_parts_as_they_come_is_that_of_all_parts(
    tmp_path_factory: pytest.TempPathFactory, shards: list[list[Rows]]
) -> None:
    folder = tmp_path_factory.mktemp("ahead")
    spec = spec_of(str(folder / "out.parquet"))
    parts = parts_of(folder / "parts", shards)
    try:
        expected = write_the_output(parts, spec, folder / "merged")
    except MusterError as error:  # there is no column
        with pytest.raises(type(error)):
            write_as_they_come(iter(parts), spec, folder / "ahead")
        return
    found = write_as_they_come(iter(parts), spec, folder / "ahead")
    if found is not None:  # it gives up where the types change often
        assert found == expected
        assert (folder / "ahead").read_bytes() == (folder / "merged").read_bytes()


LATE: dict[str, list[Rows]] = {
    "null, then numbers": [[{"a": None}], [{"a": 1}], [{"a": 2}]],
    "whole numbers, then others": [[{"a": 1}], [{"a": 2}], [{"a": 3}], [{"a": 4}], [{"a": 0.5}]],
    "whole floats at the end": [[{"a": 1}], [{"a": 2}], [{"a": 3.0}]],
    "numbers, then texts": [[{"a": 1}], [{"a": 2}], [{"a": 3}], [{"a": "x"}], [{"a": 5}]],
    "texts, then numbers": [[{"a": "x"}], [{"a": "y"}], [{"a": "z"}], [{"a": 5}]],
    "another column": [[{"a": 1}], [{"a": 2}], [{"a": 3, "b": [1]}]],
    "another field": [[{"a": {"x": 1}}], [{"a": {"x": 1}}], [{"a": {"y": 1.5}}]],
    "nothing at first": [[], [], [{"a": 1}]],
    "nothing at the end": [[{"a": 1}], []],
}


@pytest.mark.parametrize("what", LATE)
def test_what_comes_late_changes_the_types_of_all(tmp_path: Path, what: str) -> None:
    spec, parts = spec_of(str(tmp_path / "out.parquet")), parts_of(tmp_path / "parts", [LATE[what]])
    expected = write_the_output(parts, spec, tmp_path / "merged")
    assert write_as_they_come(iter(parts), spec, tmp_path / "ahead") == expected
    assert (tmp_path / "ahead").read_bytes() == (tmp_path / "merged").read_bytes()


def test_a_column_in_each_part_is_left_to_the_merge(tmp_path: Path) -> None:
    rows = [{f"c{k}": k if k == j else None for k in range(30)} for j in range(30)]
    parts = parts_of(tmp_path / "parts", [[[row] * 10] for row in rows])
    spec, seen = spec_of(str(tmp_path / "out.parquet")), []

    def coming() -> Iterator[Part]:
        for one in parts:
            seen.append(one)
            yield one

    assert write_as_they_come(coming(), spec, tmp_path / "ahead") is None
    assert len(seen) < 15  # and no more were written, again and again


@pytest.mark.thorough
def test_carried_columns_of_other_types_are_left_to_the_merge(
    tmp_path: Path,
) -> None:
    (tmp_path / "in").mkdir()
    for name, values in (("a", list(range(40))), ("b", [f"s{n}" for n in range(40)])):
        pq.write_table(pa.table({"x": values}), tmp_path / "in" / f"{name}.parquet")
    (tmp_path / "st.py").write_text("def stage(r): return {**r, 'y': 1}\n")
    done = subprocess.run(
        [sys.executable, "-m", "muster", "map", "st.py:stage", "--input", "in", "--output",
         "out.parquet", "--devices", "cpu:1", "--chunk-rows", "8"],
        cwd=tmp_path, capture_output=True, text=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr and "ArrowInvalid" not in done.stderr
    assert pq.read_table(tmp_path / "out.parquet").num_rows == 80


def test_a_part_is_written_before_the_next_one_is_there(tmp_path: Path) -> None:
    rows: Rows = [{"text": os.urandom(500_000).hex()} for _ in range(12)]  # more than a row group
    first, second = parts_of(tmp_path / "parts", [[rows], [rows]])
    spec = spec_of(str(tmp_path / "out.parquet"))

    def coming() -> Iterator[Part]:
        yield first
        patience_s = time.monotonic() + 60
        while spec.path.stat().st_size < 1_000_000:
            assert time.monotonic() < patience_s
            time.sleep(0.01)
        yield second

    assert write_as_they_come(coming(), spec, spec.path) is not None
    assert pq.read_metadata(spec.path).num_rows == 24


def test_a_value_that_does_not_fit_its_declared_column_is_not_written(tmp_path: Path) -> None:
    spec = SinkSpec(path=tmp_path / "o.parquet", format="parquet", columns=(("a", "int8"),))
    parts = parts_of(tmp_path / "parts", [[[{"a": 1}], [{"a": 300}]]])
    with pytest.raises(UsageError, match="declared as int8"):
        write_as_they_come(iter(parts), spec, tmp_path / "ahead")


def test_a_list_that_is_longer_than_the_first_one_is_not_written(tmp_path: Path) -> None:
    """As long as no list has come, any length will do."""
    spec = spec_of(str(tmp_path / "out.parquet"))
    spec = dataclasses.replace(spec, columns=(("v", "float32[*]"),))
    rows: list[Rows] = [[{"v": None}], [{"v": [1.0, 2.0]}], [{"v": None}], [{"v": [1.0, 2.0, 3.0]}]]
    parts = parts_of(tmp_path / "parts", [rows])
    with pytest.raises(UsageError, match="declared as float32"):
        write_the_output(parts, spec, tmp_path / "merged")
    with pytest.raises(UsageError, match="declared as float32"):
        write_as_they_come(iter(parts), spec, tmp_path / "ahead")


def test_of_no_part_nothing_is_written(tmp_path: Path) -> None:
    spec = spec_of(str(tmp_path / "out.parquet"))
    assert write_as_they_come(itertools.chain(), spec, tmp_path / "ahead") is None
    assert names(tmp_path) == set()
