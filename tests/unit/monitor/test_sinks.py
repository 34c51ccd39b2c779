"""Logs that survive: cut at every byte, refused when they are not ours, one header for ever."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.base.errors import SetupError, UsageError
from muster.monitor import sinks
from muster.monitor.files import read_rows, tail_file, to_csv
from muster.monitor.sample import COLUMNS, Row
from muster.monitor.sinks import open_sink

SUFFIXES = ("csv", "jsonl", "parquet")


def row(number: int, device: str = "host", **values: object) -> Row:
    return Row(
        time_utc=f"2026-01-31T09:05:{number:02d}.000+00:00",
        elapsed_s=float(number),
        host="box",
        device=device,
        **values,  # type: ignore[arg-type]
    )


def write(path: Path, *samples: Sequence[Row]) -> None:
    sink = open_sink(path)
    for sample in samples:
        sink.write(sample)
    sink.close()


ALL = row(
    1,
    "gpu0",
    name='a "card", of sorts',
    uuid="GPU-1",
    utilisation_percent=99.5,
    memory_used_mib=10,
    power_w=0.0,
    throttle="none",
    processes="pid 4 ada 900 MiB, run/rank 0; pid 5",
)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_rows_come_back_as_they_were(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"log.{suffix}"
    write(path, [row(0), ALL], [row(2, lost="gone")])
    assert list(read_rows(path)) == [row(0), ALL, row(2, lost="gone")]


@given(
    st.builds(
        Row,
        time_utc=st.just("2026-01-31T09:05:00.000+00:00"),
        elapsed_s=st.floats(0, 1e9),
        host=st.from_regex(r"[a-z0-9.-]+", fullmatch=True),
        device=st.sampled_from(["host", "gpu0", "gpu11:mig7"]),
        name=st.none() | st.from_regex(r"[^\n\r\0]+", fullmatch=True),
        utilisation_percent=st.none() | st.floats(0, 100),
        memory_used_mib=st.none() | st.integers(0, 2**40),
        processes=st.none() | st.from_regex(r"[^\n\r\0]+", fullmatch=True),
    )
)
def test_any_row_survives_a_line_of_csv(made: Row) -> None:
    (fields,) = csv.reader([to_csv([made]).decode()])
    assert len(fields) == len(COLUMNS)
    assert fields[4] == (made.name or "")
    assert fields[6] == ("" if made.utilisation_percent is None else str(made.utilisation_percent))


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_one_header_after_two_starts(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"log.{suffix}"
    write(path, [row(0)])
    write(path, [row(1)])
    assert [r.elapsed_s for r in read_rows(path)] == [0.0, 1.0]
    if suffix == "csv":
        assert path.read_text().count("time_utc") == 1
        assert path.read_text().splitlines()[0].split(",") == list(COLUMNS)


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_a_log_cut_at_any_byte_reads_and_goes_on(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"log.{suffix}"
    write(path, [row(0)], [ALL], [row(2)])
    whole = path.read_bytes()
    for cut in range(0, len(whole) + 1, 1 if suffix == "csv" else 7):
        path.write_bytes(whole[:cut])
        kept = list(read_rows(path))
        assert kept == [row(0), ALL, row(2)][: len(kept)]
        assert len(kept) == max(0, whole[:cut].count(b"\n") - (suffix == "csv"))
        write(path, [row(3)])
        assert list(read_rows(path)) == [*kept, row(3)]
        assert path.read_text().count("time_utc,") == (suffix == "csv")


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_what_is_not_ours_is_refused_and_left_alone(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"log.{suffix}"
    path.write_text('{"lr": 0.1}\nx,y\n1,2')
    with pytest.raises(UsageError, match="is not a log of samples") as error:
        open_sink(path)
    assert "choose another name" in str(error.value)
    assert path.read_text() == '{"lr": 0.1}\nx,y\n1,2'
    assert sorted(p.name for p in tmp_path.iterdir() if p.suffix != ".lock") == [path.name]


def test_a_format_that_is_not_known(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"gpu\.xlsx: the format \.xlsx is not known") as error:
        open_sink(tmp_path / "gpu.xlsx")
    assert "gpu.csv, gpu.jsonl or gpu.parquet" in str(error.value)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_two_writers_of_one_file_are_refused(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"log.{suffix}"
    first = open_sink(path)
    with pytest.raises(SetupError, match="Another monitor is writing"):
        open_sink(path)
    first.write([row(0)])
    first.close()
    assert [r.elapsed_s for r in read_rows(path)] == [0.0]


def test_a_full_disk_leaves_whole_rows(tmp_path: Path) -> None:
    """In a process whose files may grow to 2 KiB: the kernel takes a part of the last write."""
    path = tmp_path / "log.csv"
    code = """
import resource, signal, sys
sys.path.insert(0, sys.argv[2])
from test_sinks import row
from muster.monitor.sinks import open_sink
from pathlib import Path
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (2048, 2048))
sink = open_sink(Path(sys.argv[1]))
try:
    for number in range(60):
        sink.write([row(number, processes="x" * 90)])
except OSError as error:
    print(error.errno)
"""
    here = str(Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", code, str(path), here], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "27"  # EFBIG
    assert path.read_bytes().endswith(b"\n")
    numbers = [r.elapsed_s for r in read_rows(path)]
    assert numbers == list(map(float, range(len(numbers))))
    assert len(numbers) > 5


def test_a_parquet_file_takes_in_its_tail_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sinks, "_FOLD_AFTER", 3)
    path = tmp_path / "log.parquet"
    sink = open_sink(path)
    for number in range(7):
        sink.write([row(number)])
    assert pq.read_table(path).num_rows == 6
    assert [r.elapsed_s for r in read_rows(path)] == list(map(float, range(7)))
    sink.close()
    assert pq.read_table(path).num_rows == 7
    assert [p.name for p in tmp_path.iterdir()] == ["log.parquet"]


def test_where_the_tail_cannot_be_taken_in_it_waits_for_the_next_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sinks, "_FOLD_AFTER", 2)
    here = tmp_path / "here"
    here.mkdir()
    path = here / "log.parquet"
    sink = open_sink(path)
    sink.write([row(0)])
    away = here.rename(tmp_path / "away")  # as a file system that is gone for a moment
    with pytest.raises(FileNotFoundError):
        sink.write([row(1)])
    away.rename(here)
    sink.write([row(2)])
    sink.close()
    assert pq.read_table(path)["elapsed_s"].to_pylist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("is_tail_left", [False, True])
def test_a_kill_while_the_tail_is_taken_in_loses_and_doubles_nothing(
    tmp_path: Path, is_tail_left: bool
) -> None:
    path = tmp_path / "log.parquet"
    sink = open_sink(path)
    sink.write([row(0)])
    sink.write([row(1)])
    tail = tail_file(path, 1)
    lines = tail.read_bytes()
    sink.close()
    if is_tail_left:  # killed after the file was replaced and before its tail was removed
        tail.write_bytes(lines)
    assert [r.elapsed_s for r in read_rows(path)] == [0.0, 1.0]
    write(path, [row(2)])
    assert [r.elapsed_s for r in read_rows(path)] == [0.0, 1.0, 2.0]
    assert pq.read_table(path)["elapsed_s"].to_pylist() == [0.0, 1.0, 2.0]


def test_parquet_columns_have_their_types(tmp_path: Path) -> None:
    path = tmp_path / "log.parquet"
    write(path, [row(0), ALL])
    types = {field.name: str(field.type) for field in pq.read_schema(path)}
    assert (types["time_utc"], types["power_w"], types["memory_used_mib"]) == (
        "string",
        "double",
        "int64",
    )


def test_a_log_that_has_just_begun_can_be_read(tmp_path: Path) -> None:
    """Its rows wait in the tail: there is no Parquet file before the first fold."""
    path = tmp_path / "log.parquet"
    sink = open_sink(path)
    sink.write([row(0)])
    assert not path.exists()
    assert list(read_rows(path)) == [row(0)]
    sink.close()
    assert list(read_rows(path)) == [row(0)]


WRITER = """
import sys
sys.path.insert(0, sys.argv[2])
from test_sinks import row
from muster.monitor import sinks
from muster.monitor.sinks import open_sink
from pathlib import Path
sinks._FOLD_AFTER = 5
sink = open_sink(Path(sys.argv[1]))
number = 0
while True:
    sink.write([row(number, f"gpu{n}", processes="x" * 3000) for n in range(9)])
    number += 1
    print(number, flush=True)
"""


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_kill_9_while_it_writes_leaves_a_readable_file(tmp_path: Path, suffix: str) -> None:
    """Written without a pause, so that the kill falls into a write; then gone on with."""
    path = tmp_path / f"log.{suffix}"
    here = str(Path(__file__).parent)
    acknowledged = 0
    for delay_s in (0.03, 0.0):
        words = [sys.executable, "-c", WRITER, str(path), here]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(delay_s)
            os.kill(process.pid, signal.SIGKILL)
            said = [1, *map(int, process.stdout.read().split("\n")[:-1])]
        acknowledged += said[-1]
        if suffix == "parquet" and path.exists():
            pq.read_table(path)  # whatever moment it was
        samples = [r.device for r in read_rows(path)].count("gpu0")
        # At most the one that was being written is more than what was said to be written.
        assert acknowledged <= samples <= acknowledged + 1
        acknowledged = samples
    write(path, [row(59)])
    assert list(read_rows(path))[-1] == row(59)


def test_json_lines_that_are_no_samples_are_refused_in_words(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"  # such as the output of a map
    path.write_text('{"x": 1}\n{"x": 2}\n')

    with pytest.raises(SetupError, match="not a sample: it has no time_utc"):
        list(read_rows(path))
