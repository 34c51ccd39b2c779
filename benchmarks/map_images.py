"""Images through ``muster map``, from Parquet to Parquet, beside a copy of the file by pyarrow.

    python benchmarks/map_images.py            # 40,000 images of 50 kB, 2 GB; minutes
    python benchmarks/map_images.py --quick    # 2,000 images, one round

A binary column of bytes that cannot be compressed, in row groups of 100 rows, and a stage that
looks at each image and returns its record (``same``), or a new image (``new``), on two workers. The
copy is one process, which reads batches, writes them with the compression that muster uses, and
syncs. "by hand" makes new images as somebody would who has two cores and must not do an image again
after a kill: two forked processes read row groups, and write, sync and rename a part for every ten
of them; the parts are then copied to the output. It gives no ids, rejects nothing and notices no
changed input: it bounds what ``new`` can reach. Seconds are from the start of the command to its
end; processor seconds are of all its processes.
Goal: 0.9 of the copy's rate for both.
"""

from __future__ import annotations

import argparse
import inspect
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).parent))
from measuring import goal, machine, summary, table, write_json

COPY, BY_HAND, GOAL = "pyarrow copy", "by hand", 0.9
SIZE, GROUP, GROUPS_PER_PART = 50_000, 100, 10
START = b"\xff\xd8\xff\xe0"


def same(record: dict[str, Any]) -> dict[str, Any]:
    if not record["image"].startswith(START):
        raise ValueError("no image")
    return record


def new(record: dict[str, Any]) -> dict[str, Any]:
    return {**record, "image": record["image"][:-1] + b"\0"}


def copy(source: str, target: str) -> None:
    with pq.ParquetFile(source) as file, Path(target).open("wb") as out:
        with pq.ParquetWriter(out, file.schema_arrow, compression="zstd") as writer:
            for batch in file.iter_batches(GROUP):
                writer.write_batch(batch)
        out.flush()
        os.fsync(out.fileno())


def by_hand(source: str, target: str) -> None:
    import multiprocessing

    num_groups = pq.read_metadata(source).num_row_groups
    jobs = [(source, target, first) for first in range(0, num_groups, GROUPS_PER_PART)]
    with multiprocessing.get_context("fork").Pool(2) as pool:
        parts = pool.starmap(make_part, jobs, chunksize=1)
    temporary = Path(f"{target}.tmp")
    schema = pq.read_schema(parts[0])
    with temporary.open("wb") as out:
        with pq.ParquetWriter(out, schema, compression="zstd") as writer:
            for part in parts:
                with pq.ParquetFile(part) as file:
                    for batch in file.iter_batches(GROUP):
                        writer.write_batch(batch)
        out.flush()
        os.fsync(out.fileno())
    temporary.rename(target)
    for part in parts:
        part.unlink()


def make_part(source: str, target: str, first: int) -> Path:
    part = Path(f"{target}-{first:06d}.part")
    if part.exists():
        return part
    temporary = part.with_suffix(".tmp")
    with pq.ParquetFile(source) as file, temporary.open("wb") as out:
        # What is incompressible is not compressed twice.
        with pq.ParquetWriter(out, file.schema_arrow, compression="none") as writer:
            for group in range(first, min(first + GROUPS_PER_PART, file.num_row_groups)):
                rows = [new(record) for record in file.read_row_group(group).to_pylist()]
                writer.write_batch(pa.RecordBatch.from_pylist(rows, schema=file.schema_arrow))
        out.flush()
        os.fsync(out.fileno())
    temporary.rename(part)
    return part


def write_input(path: Path, count: int) -> None:
    schema = pa.schema([("n", pa.int64()), ("image", pa.binary())])
    with pq.ParquetWriter(path, schema) as writer:
        for first in range(0, count, GROUP):
            rows = range(first, min(count, first + GROUP))
            images = [START + os.urandom(SIZE) for _ in rows]
            writer.write_table(pa.table({"n": rows, "image": images}, schema), GROUP)


PROGRAMS = {COPY: copy, BY_HAND: by_hand}


def command_for(contender: str, source: Path, folder: Path) -> list[str]:
    if contender in PROGRAMS:
        out = str(folder / "out.parquet")
        return [sys.executable, __file__, "--as", contender, str(source), out]
    return [
        *(sys.executable, "-m", "muster", "map", f"stages.py:{contender}", "--input", str(source)),
        *("--output", "out.parquet", "--devices", "cpu:2", "--no-ids", "--quiet"),
        *("--run-dir", "run"),
    ]


def measure(contender: str, source: Path, count: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as name:
        folder = Path(name)
        head = f"from typing import Any\n\nSTART = {START!r}\n\n\n"
        (folder / "stages.py").write_text(head + "\n\n".join(map(inspect.getsource, (same, new))))
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        subprocess.run(command_for(contender, source, folder), cwd=folder, check=True)
        seconds, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
        found = pq.ParquetFile(folder / "out.parquet")
        assert found.metadata.num_rows == count
        if contender in (COPY, "same"):
            for one, two in zip(
                found.iter_batches(GROUP), pq.ParquetFile(source).iter_batches(GROUP), strict=True
            ):
                assert one.equals(two), f"{contender} has made other rows"
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"  {contender}: {seconds:.2f} s, {processor:.2f} processor seconds", file=sys.stderr)
    return {"seconds": seconds, "processor_s": processor}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=40_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--stages", nargs="+", default=["same", "new"], choices=["same", "new"])
    parser.add_argument("--quick", action="store_true", help="2,000 images, one round")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--as", dest="program", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.program:
        name, source, target = args.program
        PROGRAMS[name](source, target)
        return
    if args.quick:
        args.images, args.repeats = 2_000, 1
    contenders = [COPY, *args.stages, *([BY_HAND] if "new" in args.stages else [])]
    found: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as name:
        source = Path(name) / "in.parquet"
        write_input(source, args.images)
        for number in range(args.repeats):
            for one in contenders if number % 2 == 0 else contenders[::-1]:
                found[one].append(measure(one, source, args.images))
    record: dict[str, Any] = {"machine": machine(), "images": args.images, "bytes": SIZE}
    rows = []
    for one, values in found.items():
        pairs = list(zip(values, found[COPY], strict=True))
        record[one] = {
            "images_per_s": summary([args.images / value["seconds"] for value in values]),
            "of_copy": summary([base["seconds"] / value["seconds"] for value, base in pairs]),
            "processor_of_copy": summary(
                [value["processor_s"] / base["processor_s"] for value, base in pairs]
            ),
        }
        rate, ratio, work = record[one].values()
        range_ = f"[{ratio['low']:.2f}–{ratio['high']:.2f}]"
        figures = f"{rate['median']:,.0f}", f"{ratio['median']:.2f}", range_
        rows.append([one, *figures, f"{work['median']:.2f}"])
    print(f"\n{args.images:,} images of {SIZE:,} bytes, {args.repeats} rounds")
    table(["", "images/s", "of the copy", "range", "× its processor time"], rows)
    for one, name in (("same", "images"), ("new", "new images")):
        if one in record:
            ratio = record[one]["of_copy"]["median"]
            goal(f"{name}, of the copy", f"≥ {GOAL}", f"{ratio:.2f}", ratio >= GOAL)
    write_json(args.json, record)


if __name__ == "__main__":
    main()
