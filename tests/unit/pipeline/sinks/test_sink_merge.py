"""The merge: all of the parts in order, or nothing; the old output or the new one."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from tests.examples import examples
from tests.unit.pipeline.sinks.sink_parts import Rows, cuts, flat, lines, part, parts_of

from muster.base.errors import SetupError, UsageError
from muster.pipeline.sinks.formats import SinkSpec, files_of, read_output, spec_of
from muster.pipeline.sinks.merge import merge
from muster.pipeline.sinks.parts import Part

ROOT = str(Path(__file__).parents[4])


def thorough(name: str) -> Any:
    """An output whose encoder costs a second and more: `make test` has the others."""
    return pytest.param(name, marks=pytest.mark.thorough)


def jsonl(folder: Path) -> SinkSpec:
    return spec_of(str(folder / "out.jsonl"))


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@examples(60)
@given(cuts)
def test_jsonl_is_the_parts_one_after_the_other(
    tmp_path_factory: pytest.TempPathFactory, shards: list[list[Rows]]
) -> None:
    folder = tmp_path_factory.mktemp("merge")
    parts = parts_of(folder / "parts", shards)
    merged = merge(parts, jsonl(folder), errors=folder / "errors.jsonl")
    expected = lines(flat(shards))
    assert (folder / "out.jsonl").read_bytes() == expected
    assert (merged.num_rows, merged.num_bytes) == (len(flat(shards)), len(expected))
    assert list(read_output(jsonl(folder))) == flat(shards)
    assert names(folder) == {"parts", "out.jsonl"}


@examples(30)
@given(cuts)
def test_a_folder_has_a_file_per_shard_and_a_manifest_that_is_right(
    tmp_path_factory: pytest.TempPathFactory, shards: list[list[Rows]]
) -> None:
    folder = tmp_path_factory.mktemp("merge")
    spec = spec_of(f"{folder}/out/")
    merged = merge(parts_of(folder / "parts", shards), spec, errors=folder / "errors.jsonl")
    manifest = json.loads((spec.path / "manifest.json").read_bytes())
    assert [entry["file"] for entry in manifest["files"]] == [
        f"part-{order:05d}.jsonl" for order in range(len(shards))
    ]
    for entry, shard in zip(manifest["files"], shards, strict=True):
        data = (spec.path / entry["file"]).read_bytes()
        assert data == lines(flat([shard]))
        assert entry["rows"] == len(flat([shard]))
        assert entry["bytes"] == len(data)
        assert entry["sha256"] == hashlib.sha256(data).hexdigest()
    assert merged.num_bytes == sum(path.stat().st_size for path in files_of(spec))
    assert names(folder) == {"parts", "out"}


def test_a_folder_of_an_earlier_time_is_replaced_and_other_files_are_not_lost(
    tmp_path: Path,
) -> None:
    spec, errors = spec_of(f"{tmp_path}/out", "jsonl"), tmp_path / "errors.jsonl"
    merge(parts_of(tmp_path / "parts", [[[{"a": 1}]], [[{"a": 2}]]]), spec, errors=errors)
    shorter = parts_of(tmp_path / "parts", [[[{"a": 3}]]])
    merge(shorter, spec, errors=errors)
    assert names(spec.path) == {"part-00000.jsonl", "manifest.json"}
    assert list(read_output(spec)) == [{"a": 3}]
    assert names(tmp_path) == {"parts", "out"}
    (spec.path / "thesis.txt").write_text("years of work")
    with pytest.raises(UsageError, match=r"holds other files \(thesis\.txt\)"):
        merge(shorter, spec, errors=errors)
    assert (spec.path / "thesis.txt").read_text() == "years of work"


def test_errors_of_all_parts_come_in_order_and_a_stale_file_goes(tmp_path: Path) -> None:
    home = tmp_path / "parts"
    home.mkdir()
    errors = tmp_path / "run" / "errors.jsonl"
    parts = [
        part(home, 0, 0, [{"a": 1}], bad=[{"row": 1}, {"row": 2}]),
        part(home, 0, 3, [{"a": 2}]),
        part(home, 1, 0, [], bad=[{"row": 9}]),
    ]
    merged = merge(parts, jsonl(tmp_path), errors=errors)
    assert errors.read_bytes() == lines([{"row": 1}, {"row": 2}, {"row": 9}])
    assert (merged.num_rows, merged.num_errors) == (2, 3)
    merge([part(home, 0, 0, [{"a": 1}])], jsonl(tmp_path), errors=errors)
    assert not errors.exists()


HOLES = {
    "rows 0 to 2 of shard 0 have no part": [(0, 2)],
    "rows 2 to 4 of shard 0 have no part": [(0, 0), (0, 4)],
    "rows 1 to 2 of shard 0 are there twice": [(0, 0), (0, 1)],
    "shard 1 has no part, the next is of shard 2": [(0, 0), (2, 0)],
    "shard 0 comes after shard 1": [(0, 0), (1, 0), (0, 2)],
}


@pytest.mark.parametrize("what", HOLES)
def test_parts_that_do_not_make_up_the_whole_are_refused(tmp_path: Path, what: str) -> None:
    spec = jsonl(tmp_path)
    spec.path.write_bytes(b"old\n")
    parts = [part(tmp_path, order, start, [{"a": 1}, {"a": 2}]) for order, start in HOLES[what]]
    with pytest.raises(SetupError, match=what):
        merge(parts, spec, errors=tmp_path / "errors.jsonl")
    assert spec.path.read_bytes() == b"old\n"


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 2)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "sha256": _flip,
    "bytes where": _cut,
    "is missing": Path.unlink,
}


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet", "out.csv", "out/"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_part_is_named_and_nothing_is_written(
    tmp_path: Path, damage: str, name: str
) -> None:
    parts = parts_of(tmp_path / "parts", [[[{"a": 1, "b": 11}], [{"a": 2, "b": 22}]]])
    spec, errors = spec_of(f"{tmp_path}/{name}"), tmp_path / "errors.jsonl"
    DAMAGES[damage](parts[1].rows)
    with pytest.raises(SetupError, match=r"0-1\.jsonl.* is damaged") as caught:
        merge(parts, spec, errors=errors)
    assert damage in str(caught.value) or "is not JSON" in str(caught.value)
    assert names(tmp_path) == {"parts"}


def test_a_wrong_number_of_rows_is_damage_too(tmp_path: Path) -> None:
    good = part(tmp_path, 0, 0, [{"a": 1}, {"a": 2}], bad=[{"row": 2}])
    spec, errors = jsonl(tmp_path), tmp_path / "errors.jsonl"
    with pytest.raises(SetupError, match="has 2 lines where 3 were written"):
        merge([good._replace(num_rows=3)], spec, errors=errors)
    with pytest.raises(SetupError, match="has 1 lines where 2 were written"):
        merge([good._replace(num_errors=2)], spec, errors=errors)
    assert not spec.path.exists()
    assert not errors.exists()


MERGING = textwrap.dedent(
    """
    import sys
    sys.path.insert(0, sys.argv[1])
    from pathlib import Path
    from muster.pipeline.sinks.merge import merge
    from muster.pipeline.sinks.formats import spec_of
    from tests.unit.pipeline.sinks.sink_parts import part
    home = Path(sys.argv[2])
    rows = [{"n": n, "text": "new" * 50} for n in range(400)]
    (home / "new").mkdir(exist_ok=True)
    parts = [part(home / "new", order, 0, rows) for order in range(20)]
    spec = spec_of(sys.argv[3])
    print("ready", flush=True)
    sys.stdin.read(1)
    while True:
        merge(parts, spec, errors=home / "errors.jsonl")
    """
)


@pytest.mark.parametrize("name", ["out.jsonl", *map(thorough, ("out.csv", "out/"))])
def test_kill_9_leaves_the_old_output_or_the_new_one(tmp_path: Path, name: str) -> None:
    spec, rng = spec_of(f"{tmp_path}/{name}"), random.Random(name)
    old = [{"n": n, "text": "old"} for n in range(100)]
    new = [{"n": n, "text": "new" * 50} for n in range(400)] * 20
    for _ in range(4):
        merge(parts_of(tmp_path / "old", [[old]]), spec, errors=tmp_path / "errors.jsonl")
        command = [sys.executable, "-c", MERGING, ROOT, str(tmp_path), f"{tmp_path}/{name}"]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as child:
            assert child.stdin is not None and child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            child.stdin.write("!")
            child.stdin.flush()
            # Parquet is written by another process, which has to start.
            time.sleep(rng.uniform(0, 1.0 if spec.format == "parquet" else 0.1))
            child.send_signal(signal.SIGKILL)
        found = list(read_output(spec))
        assert found in (old, new), len(found)
    # What the killed ones have left goes with the next merge.
    merge(parts_of(tmp_path / "old", [[old]]), spec, errors=tmp_path / "errors.jsonl")
    assert names(tmp_path) == {"old", "new", spec.path.name}


LIMITED = textwrap.dedent(
    """
    import resource, signal, sys
    sys.path.insert(0, sys.argv[1])
    from pathlib import Path
    from muster.base.errors import SetupError
    from muster.pipeline.sinks.merge import merge
    from muster.pipeline.sinks.formats import spec_of
    from tests.unit.pipeline.sinks.sink_parts import part
    home = Path(sys.argv[2])
    import random
    rng = random.Random(0)
    rows = [{"n": n, "text": "%x" % rng.getrandbits(800)} for n in range(1000)]
    parts = [part(home, order, 0, rows) for order in range(4)]
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    try:
        merge(parts, spec_of(sys.argv[3]), errors=home / "errors.jsonl")
    except SetupError as error:
        print(error)
    """
)


@pytest.mark.parametrize("name", ["out.jsonl", "out.csv", thorough("out.parquet"), "out/"])
def test_no_room_for_the_output_is_said_and_leaves_the_old_one(tmp_path: Path, name: str) -> None:
    home = tmp_path / "parts"
    home.mkdir()
    spec = spec_of(f"{tmp_path}/{name}")
    merge([part(home, 0, 0, [{"old": 1}])], spec, errors=home / "errors.jsonl")
    command = [sys.executable, "-c", LIMITED, ROOT, str(home), f"{tmp_path}/{name}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"Cannot write {spec.path}: File too large.\nHint: files there")
    assert "raise the limit (ulimit -f) and run the same command again" in done.stdout
    assert done.stderr == ""
    assert list(read_output(spec)) == [{"old": 1}]
    assert names(tmp_path) == {"parts", spec.path.name}


MEASURING = textwrap.dedent(
    """
    import sys
    sys.path.insert(0, sys.argv[1])
    import resource
    from pathlib import Path
    from muster.pipeline.sinks.merge import merge
    from muster.pipeline.sinks.formats import spec_of
    from tests.unit.pipeline.sinks.sink_parts import part
    home, count, name = Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    rows = [{"n": n, "text": f"{n}" * 10, "v": [n / 7]} for n in range(8000)]
    one = part(home, 0, 0, rows)
    parts = [one._replace(order=order) for order in range(count)]
    merge(parts, spec_of(str(home / name)), errors=home / "errors.jsonl")
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    """
)


@pytest.mark.parametrize("name", ["out.jsonl", *map(thorough, ("out.csv", "out.parquet"))])
def test_memory_does_not_grow_with_the_parts(tmp_path: Path, name: str) -> None:
    def peak_kib(count: int) -> int:
        command = [sys.executable, "-c", MEASURING, ROOT, str(tmp_path), str(count), name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return int(done.stdout)

    peak_kib(1)  # so that byte code is there for both
    # More than a row group both times; the difference is 15 MB of JSON.
    assert peak_kib(45) - peak_kib(15) < 8_000


def test_the_folders_above_the_output_are_made(tmp_path: Path) -> None:
    spec = spec_of(str(tmp_path / "a" / "b" / "out.jsonl"))
    merge([part(tmp_path, 0, 0, [{"a": 1}])], spec, errors=tmp_path / "errors.jsonl")
    assert orjson.loads(spec.path.read_bytes()) == {"a": 1}
    mode = spec.path.stat().st_mode & 0o777
    umask = os.umask(0)
    os.umask(umask)
    assert mode == 0o666 & ~umask


def test_large_blocks_and_no_rows(tmp_path: Path) -> None:
    """Lines over the size of a block, and shards without any."""
    rows: Rows = [{"text": "x" * 3_000_000}, {"text": "y"}]
    parts: list[Part] = parts_of(tmp_path, [[[]], [rows], [[], []]])
    for name in ("out.jsonl", "out.csv", "out.parquet", "out/"):
        spec = spec_of(f"{tmp_path}/{name}")
        assert merge(parts, spec, errors=tmp_path / "errors.jsonl").num_rows == 2
        assert list(read_output(spec)) == rows
