"""The growing output: every part once, whatever happens while it grows."""

from __future__ import annotations

import csv
import random
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples
from tests.unit.pipeline.sinks.sink_parts import Rows, cuts, flat, lines, part, parts_of

from muster.base.errors import SetupError, UsageError
from muster.pipeline.sinks.formats import read_output, spec_of
from muster.pipeline.sinks.merge import merge
from muster.pipeline.sinks.parts import Part
from muster.pipeline.sinks.unordered import Appender, discard

pytestmark = pytest.mark.thorough

ROOT = str(Path(__file__).parents[4])


@examples(60)
@given(cuts, st.randoms(use_true_random=False), st.lists(st.integers(0, 12), max_size=3))
def test_parts_in_any_order_with_restarts_and_torn_ends(
    tmp_path_factory: pytest.TempPathFactory,
    shards: list[list[Rows]],
    rng: random.Random,
    restarts: list[int],
) -> None:
    folder = tmp_path_factory.mktemp("unordered")
    parts = parts_of(folder / "parts", shards)
    order = rng.sample(parts, len(parts))
    spec = spec_of(str(folder / "out.jsonl"))
    appender = Appender(spec)
    for number, one in enumerate(order):
        appender.add(one)
        if number in restarts:
            appender.close()
            # A process that died in the middle of the next part and of its line in the journal.
            for path, torn in ((appender.partial, b'{"a'), (appender.journal, b"[3, 0, 1")):
                with path.open("ab") as file:
                    file.write(torn)
            appender = Appender(spec)
        assert [appender.has(part) for part in order] == [n <= number for n in range(len(order))]
        appender.add(one)
    merged = appender.finish(parts, errors=folder / "errors.jsonl")
    assert spec.path.read_bytes() == b"".join(one.rows.read_bytes() for one in order)
    assert merged.num_rows == len(flat(shards))
    assert merged.num_bytes == spec.path.stat().st_size
    assert {path.name for path in folder.iterdir()} == {"parts", "out.jsonl"}


@examples(60)
@given(cuts, st.booleans())
def test_csv_has_the_columns_of_all_parts_also_of_late_ones(
    tmp_path_factory: pytest.TempPathFactory, shards: list[list[Rows]], restarts: bool
) -> None:
    folder = tmp_path_factory.mktemp("unordered")
    parts = parts_of(folder / "parts", shards)
    spec = spec_of(str(folder / "out.csv"))
    appender = Appender(spec)
    for one in parts:
        appender.add(one)
        if restarts:
            appender.close()
            appender = Appender(spec)
    appender.finish(parts, errors=folder / "errors.jsonl")
    # In this order it is what the merge writes.
    found = spec.path.read_bytes()
    merge(parts, spec, errors=folder / "errors.jsonl")
    assert found == spec.path.read_bytes()
    assert {path.name for path in folder.iterdir()} == {"parts", "out.csv"}


APPENDING = textwrap.dedent(
    """
    import sys
    sys.path.insert(0, sys.argv[1])
    from contextlib import closing
    from pathlib import Path
    from muster.pipeline.sinks.formats import spec_of
    from muster.pipeline.sinks.unordered import Appender
    from tests.unit.pipeline.sinks.sink_parts import part
    home = Path(sys.argv[2])
    def rows(order):
        return [{"n": order * 1000 + n, f"c{order % 3}": "x" * 500} for n in range(1000)]
    parts = [part(home, order, 0, rows(order)) for order in range(24)]
    print("ready", flush=True)
    sys.stdin.read(1)
    with closing(Appender(spec_of(sys.argv[3]))) as appender:
        for one in parts[::-1]:
            appender.add(one)
        appender.finish(parts, errors=home / "errors.jsonl")
    print("done", flush=True)
    """
)


@pytest.mark.parametrize("name", ["out.jsonl", "out.csv"])
def test_kill_9_at_any_moment_then_again_gives_every_part_once(tmp_path: Path, name: str) -> None:
    rng, path = random.Random(name), tmp_path / name
    home = tmp_path / "parts"
    home.mkdir()
    command = [sys.executable, "-c", APPENDING, ROOT, str(home), str(path)]
    for attempt in range(8):
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as child:
            assert child.stdin is not None and child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            child.stdin.write("!")
            child.stdin.flush()
            if attempt == 7:
                assert child.stdout.readline() == "done\n"
            else:
                time.sleep(rng.uniform(0, 0.12))
                child.send_signal(signal.SIGKILL)
        if path.exists():
            assert sorted(row["n"] for row in read_output(spec_of(str(path)))) == [*range(24_000)]
    assert {entry.name for entry in tmp_path.iterdir()} == {"parts", name}


def test_a_damaged_part_leaves_no_trace(tmp_path: Path) -> None:
    good, bad = parts_of(tmp_path / "parts", [[[{"a": 1}], [{"a": 2}] * 9]])
    bad.rows.write_bytes(lines([{"a": 3}] * 9))
    with closing(Appender(spec_of(str(tmp_path / "out.jsonl")))) as appender:
        appender.add(good)
        with pytest.raises(SetupError, match=r"0-1\.jsonl.* is damaged"):
            appender.add(bad)
        assert appender.partial.read_bytes() == lines([{"a": 1}])
        bad.rows.write_bytes(lines([{"a": 2}] * 9))
        appender.add(bad)
        appender.finish([good, bad], errors=tmp_path / "errors.jsonl")
    assert (tmp_path / "out.jsonl").read_bytes() == lines([{"a": 1}, *[{"a": 2}] * 9])


def test_finish_wants_all_parts_and_no_others(tmp_path: Path) -> None:
    parts = parts_of(tmp_path / "parts", [[[{"a": 1}]], [[{"a": 2}]]])
    spec, errors = spec_of(str(tmp_path / "out.jsonl")), tmp_path / "errors.jsonl"
    with closing(Appender(spec)) as appender:
        appender.add(parts[1])
        with pytest.raises(SetupError, match=r"1 finished parts are not in .*of shard 0"):
            appender.finish(parts, errors=errors)
        appender.add(parts[0])
        with pytest.raises(SetupError, match="records of another run"):
            appender.finish(parts[:1], errors=errors)
    other: Part = part(tmp_path / "parts", 0, 0, [{"a": "other"}])
    with (
        closing(Appender(spec)) as appender,
        pytest.raises(SetupError, match="records of another run"),
    ):
        appender.add(other)
    assert not spec.path.exists()
    discard(spec)
    assert {path.name for path in tmp_path.iterdir()} == {"parts"}


def test_errors_are_in_input_order(tmp_path: Path) -> None:
    parts = [part(tmp_path, n, 0, [{"a": n}], bad=[{"row": n}]) for n in range(3)]
    errors = tmp_path / "errors.jsonl"
    with closing(Appender(spec_of(str(tmp_path / "out.jsonl")))) as appender:
        for one in parts[::-1]:
            appender.add(one)
        merged = appender.finish(parts, errors=errors)
    assert errors.read_bytes() == lines([{"row": 0}, {"row": 1}, {"row": 2}])
    assert (merged.num_rows, merged.num_errors) == (3, 3)


def test_long_cells_and_rows_without_columns_survive_a_late_column(tmp_path: Path) -> None:
    rows: list[Rows] = [[{}], [{"a": "x" * 200_000}, {"a": None}], [{"b": "y\r\n"}]]
    parts = parts_of(tmp_path / "parts", [rows])
    spec = spec_of(str(tmp_path / "out.csv"))
    with closing(Appender(spec)) as appender:
        for one in parts:
            appender.add(one)
        appender.finish(parts, errors=tmp_path / "errors.jsonl")
    with spec.path.open(newline="") as file:
        assert list(csv.reader(file)) == [
            ["a", "b"], ["", ""], ["x" * 200_000, ""], ["", ""], ["", "y\r\n"]
        ]  # fmt: skip


@pytest.mark.parametrize(("text", "remedy"), [("o.parquet", "folder of parts"), ("o/", r"\.jsonl")])
def test_what_cannot_grow_is_refused_with_the_remedy(
    tmp_path: Path, text: str, remedy: str
) -> None:
    with pytest.raises(UsageError, match=f"cannot grow.*\nHint: .*{remedy}"):
        Appender(spec_of(f"{tmp_path}/{text}"))
    assert list(tmp_path.iterdir()) == []
