"""The journal of a chunk: what was added is there after any kind of end, in input order."""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import signal
import struct
import subprocess
import sys
import textwrap
import time
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples

from muster.base.errors import SetupError
from muster.pipeline.journal import Journal, kept_of

ranges = st.lists(st.integers(1, 5), min_size=1, max_size=12)


def lines_of(start: int, stop: int) -> tuple[bytes, bytes, int, int]:
    """Rows 3, 7, 11, … are rejects; row 5, 10, … give two lines; 4 and 8 give none."""
    rows, bad, count, num_bad = b"", b"", 0, 0
    for row in range(start, stop):
        if row % 4 == 3:
            bad, num_bad = bad + b'{"row":%d}\n' % row, num_bad + 1
            continue
        times = 2 if row % 5 == 0 else 0 if row % 4 == 0 else 1
        rows, count = rows + b'{"n":%d}\n' % row * times, count + times
    return rows, bad, count, num_bad


def add(journal: Journal, start: int, stop: int) -> None:
    rows, bad, count, num_bad = lines_of(start, stop)
    journal.add(
        start, stop, rows.splitlines(keepends=True), count, rejects=bad, num_rejects=num_bad
    )


@examples(60)
@given(ranges, st.randoms(use_true_random=False), st.integers(0, 12), st.booleans())
def test_rows_come_out_in_input_order_whatever_the_order_and_the_restarts(
    tmp_path_factory: pytest.TempPathFactory,
    widths: list[int],
    rng: random.Random,
    restart_at: int,
    shuffles: bool,
) -> None:
    folder = tmp_path_factory.mktemp("journal")
    edges = [0]
    for width in widths:
        edges.append(edges[-1] + width)
    pieces = list(itertools.pairwise(edges))
    if shuffles:
        rng.shuffle(pieces)
    journal = Journal(folder, "k")
    for number, (start, stop) in enumerate(pieces):
        if number == restart_at:
            journal.close()
            journal = Journal(folder, "k")
            assert journal.num_done == sum(b - a for a, b in pieces[:number])
        add(journal, start, stop)
    rows, bad, count, num_bad = lines_of(0, edges[-1])
    totals = journal.finish()
    assert journal.rows_path.read_bytes() == rows
    assert (journal.bad_path.read_bytes() if bad else b"") == bad
    assert (totals.num_rows, totals.num_rejects, totals.size) == (count, num_bad, len(rows))
    journal.close()
    again = Journal(folder, "k")  # killed between finishing and the ledger's commit
    assert list(again.missing(0, edges[-1])) == []
    assert again.finish() == totals
    assert again.rows_path.read_bytes() == rows
    again.close()


@examples(60)
@given(st.integers(0, 400), st.integers(0, 400), st.integers(0, 400))
def test_whatever_is_cut_off_or_changed_only_whole_entries_are_believed(
    tmp_path_factory: pytest.TempPathFactory, cut: int, change: int, which: int
) -> None:
    folder = tmp_path_factory.mktemp("torn")
    journal = Journal(folder, "k")
    for start in range(0, 24, 3):
        add(journal, start, start + 3)
    journal.close()
    path = [folder / "k.rows", folder / "k.bad", folder / "k.idx"][which % 3]
    data = bytearray(path.read_bytes())
    del data[len(data) - min(cut, len(data)) :]
    if data and change:
        data[change % len(data)] ^= 0x55
    path.write_bytes(data)
    journal = Journal(folder, "k")
    for start, stop in list(journal.missing(0, 24)):
        add(journal, start, stop)
    journal.finish()
    assert journal.rows_path.read_bytes() == lines_of(0, 24)[0]
    assert journal.bad_path.read_bytes() == lines_of(0, 24)[1]
    journal.close()


def test_large_lines_are_those_that_were_added_also_after_one_was_torn(tmp_path: Path) -> None:
    """Each is written by itself, where short ones are written together."""
    images = [bytes([row]) * 30_000 + b"\n" for row in range(4)]
    journal = Journal(tmp_path, "k")
    journal.add(0, 2, images[:2], 2)
    journal.add(2, 4, images[2:], 2)
    journal.close()
    with (tmp_path / "k.rows").open("r+b") as rows:
        rows.truncate(3 * len(images[0]) + 7)  # within the second line of the second entry
    journal = Journal(tmp_path, "k")
    assert list(journal.missing(0, 4)) == [(2, 4)]
    journal.add(2, 4, images[2:], 2)
    totals = journal.finish()
    whole = b"".join(images)
    assert journal.rows_path.read_bytes() == whole
    assert (totals.size, totals.sha256) == (len(whole), hashlib.sha256(whole).hexdigest())
    journal.close()


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_chunk_that_an_earlier_version_has_begun_goes_on(
    tmp_path: Path, is_damaged: bool
) -> None:
    """Its entries have the crc32 of their own lines."""
    index = b""
    with (tmp_path / "k.rows").open("wb") as rows, (tmp_path / "k.bad").open("wb") as bad:
        for start in (0, 3):
            lines, rejects, count, num_bad = lines_of(start, start + 3)
            rows.write(lines[:-3] + b"x" + lines[-2:] if is_damaged and start else lines)
            bad.write(rejects)
            entry = struct.pack(
                "<IIIIIQIQI", start, start + 3, count, num_bad, 0, len(lines), zlib.crc32(lines),
                len(rejects), zlib.crc32(rejects),
            )  # fmt: skip
            index += entry + struct.pack("<I", zlib.crc32(entry))
    (tmp_path / "k.idx").write_bytes(index)
    journal = Journal(tmp_path, "k")
    assert list(journal.missing(0, 9)) == [(3 if is_damaged else 6, 9)]
    for start, stop in list(journal.missing(0, 9)):
        add(journal, start, stop)
    journal.close()
    journal = Journal(tmp_path, "k")  # with entries of both kinds
    assert list(journal.missing(0, 9)) == []
    totals, whole = journal.finish(), lines_of(0, 9)[0]
    assert journal.rows_path.read_bytes() == whole
    assert totals.sha256 == hashlib.sha256(whole).hexdigest()
    journal.close()


def test_missing_names_the_gaps(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "k")
    add(journal, 4, 6)
    add(journal, 9, 10)
    assert list(journal.missing(0, 12)) == [(0, 4), (6, 9), (10, 12)]
    assert list(journal.missing(4, 9)) == [(6, 9)]
    assert journal.end == 10
    journal.close()


def test_a_finished_chunk_can_be_asked_for_more(tmp_path: Path) -> None:
    """A division that the ledger did not get to know: the chunk is whole again."""
    journal = Journal(tmp_path, "k")
    add(journal, 3, 6)
    add(journal, 0, 3)
    journal.finish()
    journal.close()
    journal = Journal(tmp_path, "k")
    assert list(journal.missing(0, 9)) == [(6, 9)]
    add(journal, 6, 9)
    journal.finish()
    assert journal.rows_path.read_bytes() == lines_of(0, 9)[0]
    journal.close()


def test_a_second_process_is_refused(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "k")
    with pytest.raises(SetupError, match="Another process still works on k"):
        Journal(tmp_path, "k")
    journal.close()
    Journal(tmp_path, "k").close()


WRITER = """
import sys
from pathlib import Path
from muster.pipeline.journal import Journal, kept_of
folder, seed = Path(sys.argv[1]), int(sys.argv[2])
journal = Journal(folder, "k")
said = 0
for start, stop in list(journal.missing(0, 3000)):
    for row in range(start, stop):
        journal.add(row, row + 1, [b'{"n":%d}\\n' % row], 1)
        print(row, flush=True)
journal.finish()
print("finished", flush=True)
"""


def test_killed_at_random_moments_it_loses_nothing_that_was_added(tmp_path: Path) -> None:
    script = tmp_path / "writer.py"
    script.write_text(textwrap.dedent(WRITER))
    rng = random.Random(5)
    last = -1
    for attempt in range(12):
        process = subprocess.Popen(
            [sys.executable, str(script), str(tmp_path), str(attempt)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        if attempt < 11:
            for _ in range(rng.randint(1, 250)):
                process.stdout.readline()
            time.sleep(rng.random() * 0.002)
            os.kill(process.pid, signal.SIGKILL)
        said = [line for line in process.stdout.read().split() if line.isdigit()]
        process.stdout.close()
        process.wait()
        journal = Journal(tmp_path, "k")
        last = max(last, *(int(line) for line in said)) if said else last
        assert journal.end > last
        journal.close()
    expected = b"".join(b'{"n":%d}\n' % row for row in range(3000))
    assert (tmp_path / "k.jsonl").read_bytes() == expected


def test_rejects_after_a_finish_that_was_cut_short_are_kept_as_well(tmp_path: Path) -> None:
    """A power cut may leave the final names of files that are not whole."""
    journal = Journal(tmp_path, "k")
    add(journal, 0, 3)
    journal.finish()
    journal.close()
    os.truncate(tmp_path / "k.jsonl", (tmp_path / "k.jsonl").stat().st_size - 1)
    journal = Journal(tmp_path, "k")
    assert list(journal.missing(0, 8)) == [(0, 8)]
    add(journal, 0, 8)  # with rejects
    journal.close()  # and a kill
    journal = Journal(tmp_path, "k")
    assert list(journal.missing(0, 8)) == []
    assert journal.finish().bad_size == len(lines_of(0, 8)[1])
    journal.close()


def test_who_looks_while_a_chunk_is_finished_sees_what_is_done(tmp_path: Path) -> None:
    """An index that was not there at the first look may have its last name by the second."""
    journal = Journal(tmp_path, "k")
    add(journal, 0, 6)

    class Looked(type(tmp_path)):  # type: ignore[misc]
        def read_bytes(self) -> bytes:
            try:
                return bytes(super().read_bytes())
            finally:
                if not (tmp_path / "k.fin").exists():
                    journal.finish()

    assert kept_of(Looked(tmp_path), "k").num_rows == 6
    assert kept_of(tmp_path, "k").num_rows == 6
    journal.close()
