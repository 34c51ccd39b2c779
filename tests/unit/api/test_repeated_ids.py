"""Two records with one id: both are kept, and the summary counts and names them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import muster
from muster.api.maps.publish import are_apart
from muster.farm.canonical import decode, encode
from muster.pipeline.sinks.formats import read_output, spec_of
from muster.pipeline.writing import RisingIds

STAGE = "def same(record):\n    return record\n"
IDS = ["a", "b", "a", "c", "b", "a"]
ROWS = [{"id": id_, "n": n} for n, id_ in enumerate(IDS)]
Cli = Callable[..., CompletedProcess[str]]


def same(record: dict[str, object]) -> dict[str, object]:
    return record


def write(path: Path) -> None:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), path)
    elif path.suffix == ".csv":
        path.write_text("id,n\n" + "".join(f"{row['id']},{row['n']}\n" for row in ROWS))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))


def ids(output: str) -> list[str]:
    return [record["id"] for record in read_output(spec_of(output))]


@pytest.mark.parametrize("source", ["in.jsonl", "in.csv", "in.parquet"])
@pytest.mark.parametrize("more", [["--output", "out.jsonl"], ["--output", "out.parquet"]])
def test_no_row_is_lost_and_the_note_names_the_first_two(
    tmp_path: Path, muster_main: Cli, source: str, more: list[str]
) -> None:
    (tmp_path / "stage.py").write_text(STAGE)
    write(tmp_path / source)
    words = ["map", "stage.py:same", "--input", source, "--on", "inline", *more]
    for _ in range(2):  # a finished run says it again
        done = muster_main(*words)
        assert done.returncode == 0, done.stderr
        text = " ".join(done.stdout.split())
        assert "3 records have the id of an earlier record; all are kept" in text
        assert '"a" is the id of records 1 and 3 of the output' in text
    assert ids(str(tmp_path / more[-1])) == IDS


@pytest.mark.parametrize("more", [[], ["--unordered"]])
def test_a_run_that_goes_on_from_its_chunks_counts_them_all(
    tmp_path: Path, muster_main: Cli, more: list[str]
) -> None:
    (tmp_path / "stage.py").write_text(STAGE)
    write(tmp_path / "in.jsonl")
    words = ["map", "stage.py:same", "--input", "in.jsonl", "--output", "out.csv", "--on", "inline"]
    words += ["--chunk-rows", "1", "--keep-parts", *more]
    assert muster_main(*words).returncode == 0
    (tmp_path / "out.csv").unlink()
    again = muster_main(*words)
    assert "3 records have the id" in " ".join(again.stdout.split())
    assert ids(str(tmp_path / "out.csv")) == IDS


def test_an_iterable_is_a_source_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = muster.map(same, iter(ROWS), "out/", executor="inline")
    assert done.num_out == len(IDS)
    assert any("3 records have the id of an earlier record" in note for note in done.notes)


@pytest.mark.parametrize(
    "rows", [[{"n": n} for n in range(6)], [{"id": n} for n in range(6)], [{"id": None}] * 3]
)
def test_ids_that_differ_or_are_none_are_no_news(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: list[dict[str, object]]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert muster.map(same, iter(rows), "out.jsonl", executor="inline").notes == ()


SOME_IDS = st.one_of(
    st.lists(st.integers(0, 9), max_size=6),
    st.sets(st.integers(-(2**70), 2**70), max_size=6).map(sorted),
    st.sets(st.text("ab\u00e9", max_size=3), max_size=6).map(sorted),
    st.lists(st.sampled_from([None, 1, 1.0, True, "1", [1]]), max_size=3),
)


@given(st.lists(SOME_IDS, max_size=4))
def test_chunks_that_say_that_their_ids_differ_have_no_id_twice(chunks: list[list[Any]]) -> None:
    ends = []
    for ids in chunks:
        rising = RisingIds([])
        rising.add(ids[:2])
        rising.add(ids[2:])
        ends.append(decode(encode(rising.ends)))
    every = [json.dumps(value) for ids in chunks for value in ids]
    assert not are_apart(ends) or len(set(every)) == len(every)


def test_ids_that_rise_are_known_to_differ_and_others_are_not() -> None:
    assert are_apart([[5, 9], [], [0, 4]])
    assert not are_apart([[0, 5], [5, 9]])
    assert not are_apart([[0, 5], None])
    assert not are_apart([None])
    assert not are_apart([[0, 5], ["a", "b"]])


@pytest.mark.parametrize("more", [[], ["--chunk-rows", "1"]])
def test_ids_that_only_a_stage_makes_are_compared_as_well(
    tmp_path: Path, muster_main: Cli, more: list[str]
) -> None:
    (tmp_path / "stage.py").write_text("def made(record):\n    return {'id': record['n'] % 4}\n")
    (tmp_path / "in.jsonl").write_text("".join(f'{{"n": {n}}}\n' for n in range(6)))
    words = ["map", "stage.py:made", "--input", "in.jsonl", "--output", "out.jsonl", *more]
    done = muster_main(*words, "--on", "inline")
    assert done.returncode == 0, done.stderr
    assert "2 records have the id of an earlier record" in " ".join(done.stdout.split())
