"""Each source of ``muster map`` into each of its sinks, killed at random moments and gone on with
by another number of workers: the files are, to the byte, those of a run that nobody disturbed.
"""

from __future__ import annotations

import datetime
import decimal
import gzip
import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.chaos.killed_map import NUM_ROWS, Place

KILLS = 6


def rows() -> list[dict[str, Any]]:
    """Texts of 3 kB: a column has several pages of Parquet, which must not end where a kill was."""
    return [{"n": n, "text": f"row {n} \u00e4, " * 250, "half": n / 2} for n in range(NUM_ROWS)]


def two_files_of_json(folder: Path) -> str:
    (folder / "in").mkdir()
    for name, some in (("a", rows()[:350]), ("b", rows()[350:])):
        text = "".join(json.dumps(row) + "\n" for row in some)
        (folder / "in" / f"{name}.jsonl").write_text(text)
    return str(folder / "in")


def packed(folder: Path) -> str:
    text = "".join(json.dumps(row) + "\n" for row in rows())
    (folder / "in.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    return str(folder / "in.jsonl.gz")


def csv(folder: Path) -> str:
    lines = [f'{row["n"]},"{row["text"]}",{row["half"]}\r\n' for row in rows()]
    (folder / "in.csv").write_text("n,text,half\r\n" + "".join(lines), newline="")
    return str(folder / "in.csv")


def typed() -> pa.Table:
    draw = random.Random(1)
    begin = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    numbers = range(NUM_ROWS)
    return pa.table(
        {
            "n": pa.array(numbers, pa.int16()),
            "text": [row["text"] for row in rows()],
            "image": [draw.randbytes(4000) for _ in numbers],
            "when": pa.array(
                [begin + datetime.timedelta(hours=n) for n in numbers],
                pa.timestamp("ns", tz="Europe/Berlin"),
            ),
            "price": [decimal.Decimal(n) / 100 if n % 7 else None for n in numbers],
            "tag": pa.array([f"t{n % 5}" for n in numbers]).dictionary_encode(),
            "nested": [{"list": [n] * (n % 3), "m": None} for n in numbers],
        }
    )


def parquet(folder: Path) -> str:
    pq.write_table(typed(), folder / "in.parquet", row_group_size=110)
    return str(folder / "in.parquet")


def hub(folder: Path) -> str:
    import datasets

    datasets.disable_progress_bars()
    table = typed().drop_columns(["tag"])  # which datasets 5 makes text of
    datasets.Dataset(table).save_to_disk(folder / "stored", num_shards=2)
    return f"hf:{folder / 'stored'}"


SOURCES: dict[str, Callable[[Path], str]] = {
    "json": two_files_of_json, "packed": packed, "csv": csv, "parquet": parquet, "hub": hub,
}  # fmt: skip
SINKS = {
    "jsonl": ("out.jsonl",),
    "csv": ("out.csv",),
    "parquet": ("out.parquet",),
    "parts": ("out/",),
    "parts of csv": ("out/", "--format", "csv"),
    "parts of parquet": ("out/", "--format", "parquet"),
}
#: Every source and every sink once; the other pairs are long.
QUICKEST = {
    ("json", "jsonl"), ("packed", "csv"), ("parquet", "parquet"), ("hub", "parts"),
}  # fmt: skip
PAIRS = [
    pytest.param(
        source, sink, marks=() if (source, sink) in QUICKEST else pytest.mark.slow,
        id=f"{source} to {sink}",
    )
    for source, sink in itertools.product(SOURCES, SINKS)
]  # fmt: skip


@pytest.mark.parametrize(("source", "sink"), PAIRS)
def test_killed_and_gone_on_with_by_others_it_writes_the_same_bytes(
    tmp_path: Path, source: str, sink: str
) -> None:
    text = SOURCES[source](tmp_path)
    quiet, storm = Place(tmp_path / "quiet", 0), Place(tmp_path / "storm", 1)
    for place in (quiet, storm):
        place.source, place.sink = (text,), SINKS[sink]
    assert quiet.start("Mixed").wait(300) == 1, quiet.said()  # rejects
    storm.num_workers = itertools.cycle((2, 1, 3))
    assert storm.storm_at_work("Mixed", most=KILLS) == 1, storm.said()
    assert storm.output() == quiet.output(), storm.kills
