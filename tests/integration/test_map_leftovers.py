"""What a map leaves, holds and refuses: beside its output, in its coordinator, and as its plan."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest

STAGES = """
import os
import pathlib
import time


def same(record):
    return record


def later(record):
    if not pathlib.Path("go").exists():
        raise ValueError("not yet")
    return record


def held(record):
    while record["n"] == 19 and not os.path.exists("go"):
        time.sleep(0.01)
    return record


def image(record):
    while record["n"] == 19 and not os.path.exists("seen"):
        time.sleep(0.01)
    return {"n": record["n"], "image": bytes([record["n"]]) + os.urandom(1_000_000)}


STEPS = [same, same]
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stages.py").write_text(STAGES)
    lines = [json.dumps({"n": n}) for n in range(20)]
    (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def call(stage: str, output: str, *more: str) -> list[str]:
    what = ("--input", "in.jsonl", "--output", output, "--devices", "cpu:1", "--run-dir", "run")
    return [sys.executable, "-m", "muster", "map", f"stages.py:{stage}", *what, *more]


def run(stage: str, output: str, *more: str, code: int = 0) -> str:
    done = subprocess.run(call(stage, output, *more), capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stderr
    return done.stderr


def test_restart_removes_what_a_kill_has_left_of_an_output(place: Path) -> None:
    """Of a folder of parts, and of a stage before the last one."""
    run("STEPS", "first/", "--stage-by-stage")
    folder = place / ".first.0123abcd.folder"
    folder.mkdir()
    (folder / "part-00000.jsonl").write_text("{}\n")
    of_stage = place / "run" / "stages" / "0" / ".output.jsonl.0123abcd.tmp"
    of_stage.write_text("{}\n")
    run("STEPS", "second.jsonl", "--stage-by-stage", "--restart")
    assert not folder.exists()
    assert not list(place.glob("run.before-*/stages/0/.output*"))
    assert (place / "first").is_dir(), "the output itself stays"


def test_an_output_of_the_same_name_in_another_folder_is_another_plan(place: Path) -> None:
    run("same", "other/out.jsonl")
    said = run("same", "run/out.jsonl", code=2)
    assert f'output: "{place}/other/out.jsonl" -> "{place}/run/out.jsonl"' in said


def test_a_moved_folder_with_its_output_in_it_is_still_the_same_plan(place: Path) -> None:
    run("same", "run/out.jsonl")
    (place / "run").rename(place / "moved")
    words = [word.replace("run/", "moved/") for word in call("same", "run/out.jsonl")]
    words[words.index("run")] = "moved"
    record = json.loads((place / "moved" / "run.json").read_text())
    for is_noted in (True, False):  # version 0.1.0 did not note the place
        if not is_noted:
            del record["fixed"]["place"], record["spec"]["place"]
            (place / "moved" / "run.json").write_text(json.dumps(record))
        done = subprocess.run(words, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr


def test_told_twice_to_end_it_ends_although_what_writes_parquet_stands_still(place: Path) -> None:
    words = ("held", "out.parquet", "--chunk-rows", "2")
    with subprocess.Popen(call(*words), stderr=subprocess.PIPE) as process:
        try:
            writer = None
            while writer is None:
                assert process.poll() is None
                children = psutil.Process(process.pid).children()
                writer = next((one for one in children if _writes(one)), None)
            writer.suspend()
            (place / "go").touch()
            process.send_signal(signal.SIGINT)
            time.sleep(0.5)
            for _ in range(2):  # two that a busy machine delivers together are one
                process.send_signal(signal.SIGINT)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(60)
                    break
            assert process.returncode in (130, -signal.SIGINT)  # Python itself may end by then
        finally:
            process.kill()
    writer.wait(120)
    assert not (place / "out.parquet").exists()
    run(*words)


def test_parquet_is_written_while_a_worker_still_works(place: Path) -> None:
    """The last row waits until a row group of those before it is in the file."""
    more = ("--chunk-rows", "2", "--no-ids")
    with subprocess.Popen(call("image", "out.parquet", *more), stderr=subprocess.PIPE) as process:
        try:
            while not any(one.stat().st_size for one in place.glob(".out.parquet.*.tmp")):
                assert process.poll() is None
                time.sleep(0.01)
            (place / "seen").touch()
            assert process.wait(120) == 0
        finally:
            process.kill()
    found = pq.read_table("out.parquet")
    assert [image[0] for image in found["image"].to_pylist()] == [*range(20)]
    assert not list(place.glob(".out.parquet*"))


def _writes(process: psutil.Process) -> bool:
    try:
        return "muster.pipeline.apart" in process.cmdline()
    except psutil.Error:
        return False


PROGRAM = """
import sys
import muster
from stages import same

if __name__ == "__main__":
    done = muster.map(same, "in.parquet", "out.parquet", devices="cpu:1")
    assert "pyarrow" not in sys.modules, "the coordinator has imported pyarrow"
    print(done.num_out)
"""


def test_parquet_in_and_out_brings_no_arrow_into_the_coordinator(place: Path) -> None:
    (place / "program.py").write_text(PROGRAM)
    make = "import pyarrow as pa, pyarrow.parquet as pq; "
    make += "pq.write_table(pa.table({'n': range(20)}), 'in.parquet', row_group_size=7)"
    subprocess.run([sys.executable, "-c", make], check=True)
    done = subprocess.run(
        [sys.executable, "program.py"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "20"


def test_files_of_runs_that_an_earlier_version_took_in_are_gone_on_with(place: Path) -> None:
    """By now a pattern leaves out what lies in folders of runs; the map had read it."""
    lines = (place / "in.jsonl").read_text()
    for name in ("a", "b"):
        (place / name).mkdir()
        (place / name / "data.jsonl").write_text(lines)
    words = call("later", "out.jsonl")
    words[words.index("in.jsonl")] = "*/*.jsonl"
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and "not yet" in done.stdout, done.stderr
    (place / "b" / "ledger.sqlite").touch()  # as if that version had begun the map
    (place / "b" / "new.jsonl").write_text(lines)
    (place / "go").touch()
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert len((place / "out.jsonl").read_text().splitlines()) == 40
    begun_now = [*words, "--restart", "--overwrite"]
    done = subprocess.run(begun_now, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert len((place / "out.jsonl").read_text().splitlines()) == 20
