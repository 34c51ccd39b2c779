"""``muster map`` as a user meets it: real files, real processes, real kills."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.conftest import MusterCli
from tests.programs import read_program

import muster

STAGES = read_program("map_stages.py")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "stages.py").write_text(STAGES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    return tmp_path


def write(path: Path, count: int) -> Path:
    path.write_text("".join(f'{{"x": {n}, "text": "row {n}"}}\n' for n in range(count)))
    return path


def call(*words: str) -> list[str]:
    return [sys.executable, "-m", "muster", "map", *words]


def run(*words: str, timeout_s: float = 300.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(call(*words), capture_output=True, text=True, timeout=timeout_s)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def notes(place: Path, kind: str = "seen") -> list[list[str]]:
    path = place / "notes"
    lines = path.read_text().splitlines() if path.exists() else []
    return [line.split()[1:] for line in lines if line.startswith(kind)]


def run_folder(place: Path) -> Path:
    [folder] = (place / "runs").iterdir()
    return folder


ON = ("--devices", "cpu:2", "--monitor-interval", "0")


@pytest.mark.quick
def test_every_record_once_in_order_and_the_second_time_nothing_is_left(place: Path) -> None:
    write(place / "in.jsonl", 1000)
    words = ("stages.py:square", "--input", "in.jsonl", "--output", "out.jsonl", *ON)
    done = run(*words, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["records_out"] == 1000
    expected = [{"id": n, "x": n, "text": f"row {n}", "y": n * n} for n in range(1000)]
    assert rows(place / "out.jsonl") == expected
    first = (place / "out.jsonl").stat().st_mtime_ns
    again = run(*words)
    assert again.returncode == 0
    assert "nothing to do" in again.stdout
    assert (place / "out.jsonl").stat().st_mtime_ns == first


def test_a_class_is_set_up_once_per_worker_and_its_fields_are_flags(place: Path) -> None:
    write(place / "in.jsonl", 500)
    words = ("stages.py:Scale", "--factor", "3", "--batch-size", "25", "--input", "in.jsonl")
    done = run(*words, "--output", "out.jsonl", *ON)
    assert done.returncode == 0, done.stderr
    assert [row["y"] for row in rows(place / "out.jsonl")] == [3 * n for n in range(500)]
    setups = notes(place, "setup")
    assert len({pid for _, pid in setups}) == len(setups) <= 2
    assert {device for device, _ in setups} == {"cpu"}
    assert max(int(size) for [size] in notes(place, "batch")) <= 25


@pytest.mark.quick
def test_poison_costs_only_itself_and_the_exit_code_says_so(
    place: Path, muster_main: MusterCli
) -> None:
    write(place / "in.jsonl", 1000)
    done = run("stages.py:fussy", "--input", "in.jsonl", "--output", "out.jsonl", *ON)
    assert done.returncode == 1
    assert "20 rejected" in done.stdout
    good = [n for n in range(1000) if n % 100 not in (7, 8)]
    assert [row["x"] for row in rows(place / "out.jsonl")] == good
    errors = rows(run_folder(place) / "errors.jsonl")
    assert [error["row"] for error in errors] == [n for n in range(1000) if n % 100 in (7, 8)]
    assert errors[0]["stage"] == "fussy"
    assert errors[0]["reason"] == "ValueError: cannot do 7"
    assert "stages.py" in errors[0]["traceback"]
    assert errors[1]["reason"] == "eight"
    name = str(run_folder(place).relative_to(place))
    told = f"20 records rejected; see why: muster why {name}"
    for look in ("status", "errors"):  # they said that all was done, and that nothing had failed
        assert told in muster_main(look, name).stdout, look
    assert json.loads(muster_main("status", name, "--json").stdout)["rejected"] == 20
    assert "  done, 20 rejected  " in muster_main("list").stdout
    assert json.loads(muster_main("list", "--json").stdout)[0]["rejected"] == 20


def test_records_that_raise_are_tried_again_when_that_is_asked_for(place: Path) -> None:
    write(place / "in.jsonl", 100)
    words = ("stages.py:flaky", "--input", "in.jsonl", *ON)
    assert run(*words, "--output", "a.jsonl").returncode == 1
    assert len(rows(place / "a.jsonl")) == 90
    again = run(*words, "--output", "b.jsonl", "--retry-exceptions", "2")
    assert again.returncode == 0, again.stderr
    assert len(rows(place / "b.jsonl")) == 100


def test_a_stage_that_fails_everything_stops_the_run_and_stores_nothing(place: Path) -> None:
    write(place / "in.jsonl", 5000)
    done = run("stages.py:all_fail", "--input", "in.jsonl", "--output", "out.jsonl", *ON)
    assert done.returncode == 1
    assert "ValueError: always" in done.stdout + done.stderr
    assert not (place / "out.jsonl").exists()
    text = (place / "stages.py").read_text()
    mended = text.replace('raise ValueError("always")', "return record")
    (place / "stages.py").write_text(mended)
    again = run(
        "stages.py:all_fail", "--input", "in.jsonl", "--output", "out.jsonl",
        "--allow-changed-code", *ON,
    )  # fmt: skip
    assert again.returncode == 0, again.stderr
    assert len(rows(place / "out.jsonl")) == 5000


def test_dropped_and_multiplied_records_keep_ids_that_lead_back(place: Path) -> None:
    write(place / "in.jsonl", 12)
    done = run("stages.py:some", "--input", "in.jsonl", "--output", "out.jsonl", *ON, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["dropped"] == 6
    ids = [row["id"] for row in rows(place / "out.jsonl")]
    assert ids == [f"{n}.{k}" for n in (0, 2, 4, 6, 8) for k in (0, 1)] + [10]


def test_a_row_that_kills_its_worker_is_found_and_rejected(place: Path) -> None:
    write(place / "in.jsonl", 200)
    words = ("--input", "in.jsonl", "--output", "out.jsonl", "--chunk-rows", "100", *ON)
    done = run("stages.py:deadly", *words)
    assert done.returncode == 1, done.stderr
    assert [row["x"] for row in rows(place / "out.jsonl")] == [
        n for n in range(200) if n not in (13, 14, 57)
    ]
    errors = rows(run_folder(place) / "errors.jsonl")
    assert [error["row"] for error in errors] == [13, 14, 57]
    assert errors[0]["stage"] == "worker"
    assert "died or hung 2 times" in errors[0]["reason"]


def test_a_row_that_hangs_is_cut_off_and_rejected(place: Path) -> None:
    write(place / "in.jsonl", 60)
    words = ("--input", "in.jsonl", "--output", "out.jsonl", "--timeout", "1", *ON)
    done = run("stages.py:hanging", *words, "--chunk-rows", "60", "--batch-size", "4")
    assert done.returncode == 1, done.stderr
    assert [row["x"] for row in rows(place / "out.jsonl")] == [n for n in range(60) if n != 21]


def test_a_record_that_waits_for_ever_is_cut_off_too(place: Path) -> None:
    write(place / "in.jsonl", 30)
    words = ("--input", "in.jsonl", "--output", "out.jsonl", "--timeout", "1", *ON)
    done = run("stages.py:Stuck", *words)
    assert done.returncode == 1, done.stderr
    assert [row["x"] for row in rows(place / "out.jsonl")] == [n for n in range(30) if n != 11]


def test_stages_are_closed_at_the_end(place: Path) -> None:
    write(place / "in.jsonl", 30)
    done = run("stages.py:Closing", "--input", "in.jsonl", "--output", "out.jsonl", *ON)
    assert done.returncode == 0, done.stderr
    assert notes(place, "closed")


def test_out_of_memory_halves_the_batch_and_goes_on(place: Path) -> None:
    write(place / "in.jsonl", 600)
    words = ("--input", "in.jsonl", "--output", "out.jsonl", "--devices", "cpu:1")
    done = run("stages.py:Hungry", *words, "--chunk-rows", "600")
    assert done.returncode == 1, done.stderr  # row 500 does not fit alone
    assert [row["x"] for row in rows(place / "out.jsonl")] == [n for n in range(600) if n != 500]
    [error] = rows(run_folder(place) / "errors.jsonl")
    assert "out of memory" in error["reason"]
    sizes = [int(size) for [size] in notes(place, "batch")]
    assert sizes[:4] == [64, 32, 16, 8]
    assert sizes.count(64) == 1  # learned
    assert len(sizes) < 150  # and not one by one ever after


def test_a_slow_function_is_not_held_up_by_its_batch(place: Path) -> None:
    """A kill costs rows in flight: few when each takes long, whatever the batch of fast ones is."""
    write(place / "in.jsonl", 400)
    words = ("--input", "in.jsonl", "--output", "out.jsonl", "--chunk-rows", "200", *ON)
    with running("stages.py:unhurried", *words) as process:
        wait_for(lambda: len(notes(place)) > 200)
        os.kill(int(notes(place)[-1][1]), signal.SIGKILL)
        assert process.wait(300) == 0
    assert [row["x"] for row in rows(place / "out.jsonl")] == list(range(400))
    assert len(notes(place)) <= 400 + 20  # at 10 ms a row, a fifth of a second


def test_one_long_chunk_is_shared_by_both_workers(place: Path) -> None:
    write(place / "in.jsonl", 400)
    words = ("--input", "in.jsonl", "--output", "out.jsonl", "--chunk-rows", "400", *ON)
    done = run("stages.py:shared", *words, "--batch-size", "4")
    assert done.returncode == 0, done.stderr
    assert [row["x"] for row in rows(place / "out.jsonl")] == list(range(400))
    seen = notes(place)
    assert sorted(int(x) for x, _ in seen) == list(range(400))  # nothing twice
    share = Counter(pid for _, pid in seen)
    assert len(share) == 2
    assert min(share.values()) > 100


def test_a_worker_over_its_memory_limit_is_replaced_between_batches(place: Path) -> None:
    write(place / "in.jsonl", 800)
    words = ("--input", "in.jsonl", "--output", "out.jsonl", "--devices", "cpu:1")
    done = run("stages.py:Leaking", *words, "--max-worker-memory", "400M", "--batch-size", "4")
    assert done.returncode == 0, done.stderr
    assert [row["x"] for row in rows(place / "out.jsonl")] == list(range(800))
    assert len({pid for [pid] in notes(place, "pid")}) > 2
    small = run("stages.py:Leaking", *words[:2], "--output", "b.jsonl", "--max-worker-memory", "9M")
    assert small.returncode == 1
    assert "--max-worker-memory allows 9 MiB" in small.stdout + small.stderr


def test_stages_that_wait_run_many_records_at_once_and_keep_their_order(place: Path) -> None:
    write(place / "in.jsonl", 300)
    words = ("--input", "in.jsonl", "--output", "out.jsonl", *ON, "--chunk-rows", "150")
    done = run("stages.py:Waiting", *words)
    assert done.returncode == 1, done.stderr
    good = [n for n in range(300) if n % 50 != 3]
    assert [row["x"] for row in rows(place / "out.jsonl")] == good
    assert [e["row"] for e in rows(run_folder(place) / "errors.jsonl")] == [
        n for n in range(300) if n % 50 == 3
    ]


def test_stage_by_stage_gives_the_same_records(place: Path) -> None:
    write(place / "in.jsonl", 100)
    together = run("stages.py:STEPS", "--input", "in.jsonl", "--output", "a.jsonl", *ON)
    assert together.returncode == 0, together.stderr
    apart = run(
        "stages.py:STEPS", "--input", "in.jsonl", "--output", "b.jsonl", "--stage-by-stage", *ON
    )
    assert apart.returncode == 0, apart.stderr
    assert (place / "a.jsonl").read_bytes() == (place / "b.jsonl").read_bytes()
    assert len(rows(place / "a.jsonl")) == 55
    words = ("--input", "in.jsonl", "--output", "b.jsonl", "--stage-by-stage", "--dry-run")
    again = run("stages.py:STEPS", *words, *ON)
    assert again.returncode == 0, again.stderr


def test_a_map_that_has_only_stages_so_far_is_looked_at_by_its_own_name(
    place: Path, muster_main: MusterCli
) -> None:
    write(place / "in.jsonl", 20)
    words = ("--input", "in.jsonl", "--output", "b.jsonl", "--stage-by-stage")
    assert run("stages.py:STEPS", *words, *ON).returncode == 0
    folder = run_folder(place)
    for path in (folder / "run.json", *folder.glob("stages/*/published.json")):
        path.unlink()  # as if it was killed before its last stage
    stages = sorted(path.name for path in (folder / "stages").iterdir())
    (folder / "stages" / stages[-1] / "logs" / "worker-0.log").write_text("of the last one\n")
    assert muster_main("status", str(folder), "--watch").stdout.startswith(stages[-1])
    assert "worker-0: of the last one\n" in muster_main("logs", str(folder), "-n", "1").stdout
    assert "nothing to cancel" in muster_main("cancel", str(folder)).stdout


def test_an_unordered_output_grows_while_the_map_runs(place: Path) -> None:
    write(place / "in.jsonl", 400)
    words = ("stages.py:unhurried", "--input", "in.jsonl", "--chunk-rows", "40", *ON)
    partial = place / "loose.jsonl.partial"
    with running(*words, "--output", "loose.jsonl", "--unordered") as process:
        wait_for(lambda: partial.exists() and partial.stat().st_size > 0)
        assert process.poll() is None
        os.kill(process.pid, signal.SIGKILL)
    again = run(*words, "--output", "loose.jsonl", "--unordered")
    assert again.returncode == 0, again.stderr
    assert sorted(row["x"] for row in rows(place / "loose.jsonl")) == list(range(400))
    assert not partial.exists()
    refused = run(*words, "--output", "loose.parquet", "--unordered")
    assert refused.returncode == 2
    assert "cannot grow" in refused.stderr


def test_which_records_is_the_users_choice(place: Path) -> None:
    write(place / "in.jsonl", 1000)
    words = ("stages.py:square", "--input", "in.jsonl", *ON)
    done = run(*words, "--output", "a.jsonl", "--skip", "100", "--limit", "50", "--where", "x>=120")
    assert done.returncode == 0, done.stderr
    assert [row["x"] for row in rows(place / "a.jsonl")] == list(range(120, 150))
    for name in ("b", "c"):
        done = run(*words, "--output", f"{name}.jsonl", "--shuffle-seed", "4", "--limit", "200")
        assert done.returncode == 0, done.stderr
    shuffled = [row["x"] for row in rows(place / "b.jsonl")]
    assert shuffled == [row["x"] for row in rows(place / "c.jsonl")]
    assert len(set(shuffled)) == 200
    assert shuffled != sorted(shuffled)
    assert [row["id"] for row in rows(place / "b.jsonl")] == shuffled  # rows of the input


def test_from_python_with_an_iterator(place: Path) -> None:
    source = ({"x": n} for n in range(250))
    script = place / "script.py"
    script.write_text(
        "import muster\nfrom stages import square\n"
        "if __name__ == '__main__':\n"
        "    done = muster.map(square, ({'x': n} for n in range(250)), 'out.jsonl',"
        " devices='cpu:2')\n"
        "    print(done.num_out, done.exit_code)\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.stdout.split() == ["250", "0"], done.stderr
    assert [row["y"] for row in rows(place / "out.jsonl")] == [n * n for n in range(250)]
    assert next(source)["x"] == 0
    with pytest.raises(muster.UsageError, match="option of map"):
        muster.map("stages.py:square", "in.jsonl", "x.jsonl", bacth_size=3)


# ---------------------------------------------------------------------- interrupted


@contextlib.contextmanager
def started(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def running(*words: str) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    return started(call(*words))


def wait_for(condition: Callable[[], bool], timeout_s: float = 300.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


SLOW = ("stages.py:unhurried", "--input", "in.jsonl", "--batch-size", "4", *ON)


def test_a_killed_worker_costs_at_most_the_rows_in_flight(place: Path) -> None:
    write(place / "in.jsonl", 300)
    with running(*SLOW, "--output", "out.jsonl", "--chunk-rows", "150") as process:
        wait_for(lambda: len(notes(place)) > 150)
        os.kill(int(notes(place)[-1][1]), signal.SIGKILL)
        assert process.wait(300) == 0
    assert [row["x"] for row in rows(place / "out.jsonl")] == list(range(300))
    assert len(notes(place)) <= 300 + 4


@pytest.mark.quick
def test_a_killed_coordinator_leaves_nothing_running_and_the_next_goes_on(place: Path) -> None:
    write(place / "in.jsonl", 300)
    words = (*SLOW, "--output", "out.jsonl", "--chunk-rows", "150")
    with running(*words) as process:
        wait_for(lambda: len(notes(place)) > 150)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        workers = {int(pid) for _, pid in notes(place)}
        wait_for(lambda: not any(psutil.pid_exists(pid) for pid in workers))
    again = run(*words)
    assert again.returncode == 0, again.stderr
    assert [row["x"] for row in rows(place / "out.jsonl")] == list(range(300))
    assert len(notes(place)) <= 300 + 2 * 4


def test_a_frozen_worker_does_not_stop_the_job(place: Path) -> None:
    write(place / "in.jsonl", 200)
    words = (*SLOW, "--output", "out.jsonl", "--chunk-rows", "100", "--timeout", "2")
    with running(*words) as process:
        wait_for(lambda: len(notes(place)) > 60)
        os.kill(int(notes(place)[-1][1]), signal.SIGSTOP)
        assert process.wait(300) == 0
    assert [row["x"] for row in rows(place / "out.jsonl")] == list(range(200))


def test_ctrl_c_saves_and_resume_goes_on(place: Path) -> None:
    write(place / "in.jsonl", 300)
    with running(*SLOW, "--output", "out.jsonl", "--chunk-rows", "20") as process:
        wait_for(lambda: len(notes(place)) > 50)
        process.send_signal(signal.SIGINT)
        assert process.wait(300) == 130
    assert not (place / "out.jsonl").exists()
    command = [sys.executable, "-m", "muster", "resume", str(run_folder(place))]
    again = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert again.returncode == 0, again.stderr
    assert [row["x"] for row in rows(place / "out.jsonl")] == list(range(300))
    assert len(notes(place)) == 300


@pytest.mark.parametrize("again", [pytest.param("the command", marks=pytest.mark.slow), "resume"])
def test_stage_by_stage_killed_in_each_stage_goes_on_in_it(place: Path, again: str) -> None:
    write(place / "in.jsonl", 160)
    words = ("stages.py:SLOWLY", "--input", "in.jsonl", "--batch-size", "4", *ON)
    first = call(*words, "--output", "out.jsonl", "--chunk-rows", "40", "--stage-by-stage")
    command = first
    for kind in ("seen", "later"):
        with started(command) as process:
            wait_for(lambda: len(notes(place, kind)) > 50)  # noqa: B023
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        workers = {int(pid) for _, pid in notes(place, kind)}
        wait_for(lambda: not any(psutil.pid_exists(pid) for pid in workers))  # noqa: B023
        assert not (place / "out.jsonl").exists()
        if again == "resume":  # of a folder that was moved meanwhile, too
            folder = run_folder(place).rename(place / "runs" / f"moved-{kind}")
            command = [sys.executable, "-m", "muster", "resume", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert rows(place / "out.jsonl") == [
        {"id": n, "x": n, "y": n * n, "z": n * n + 1} for n in range(160)
    ]
    for kind in ("seen", "later"):
        assert len(notes(place, kind)) <= 160 + 2 * 4  # what both workers had in hand


# ---------------------------------------------------------------------- refused


def cut_short(place: Path, *words: str) -> None:
    """A run that has begun and is not over."""
    with running(*words) as process:
        wait_for(lambda: len(notes(place)) > 20)
        os.kill(process.pid, signal.SIGKILL)


def test_another_plan_on_the_same_output_is_refused_with_what_differs(place: Path) -> None:
    write(place / "in.jsonl", 300)
    cut_short(place, *SLOW, "--output", "out.jsonl")
    with (place / "in.jsonl").open("a") as file:
        file.write('{"x": 1}\n')
    changed = run(*SLOW, "--output", "out.jsonl")
    assert changed.returncode == 2
    assert "in.jsonl" in changed.stderr
    assert "--restart" in changed.stderr
    write(place / "in.jsonl", 300)
    assert run(*SLOW, "--output", "out.jsonl", "--limit", "10").returncode == 2
    source = (place / "stages.py").read_text()
    (place / "stages.py").write_text(source + "\n# another version\n")
    code = run(*SLOW, "--output", "out.jsonl")
    assert code.returncode == 2
    assert "The code has changed" in code.stderr and "stages.py" in code.stderr
    (place / "stages.py").write_text(source)
    assert run(*SLOW, "--output", "out.jsonl").returncode == 0


def test_changed_flags_are_named_and_restart_begins_again(place: Path) -> None:
    write(place / "in.jsonl", 50)
    words = ("stages.py:Scale", "--input", "in.jsonl", "--output", "out.jsonl", *ON)
    assert run(*words).returncode == 0
    other = run(*words, "--factor", "7")
    assert other.returncode == 2
    assert "factor: 10 -> 7" in other.stderr
    anew = run(*words, "--factor", "7", "--restart", "--overwrite")
    assert anew.returncode == 0, anew.stderr
    assert rows(place / "out.jsonl")[3]["y"] == 21
    (place / "out.jsonl").write_text("edited\n")
    refused = run(*words, "--factor", "7")  # --overwrite alone has nothing to write it from
    assert refused.returncode == 2 and "--restart --overwrite" in refused.stderr


def test_a_finished_run_notices_changes_and_can_begin_again(place: Path) -> None:
    write(place / "in.jsonl", 50)
    words = ("stages.py:square", "--input", "in.jsonl", "--output", "out.jsonl", *ON)
    assert run(*words).returncode == 0
    source = (place / "stages.py").read_text()
    (place / "stages.py").write_text(source.replace('record["x"] ** 2', 'record["x"] ** 3'))
    changed = run(*words)
    assert changed.returncode == 2
    assert "The code has changed" in changed.stderr and "stages.py" in changed.stderr
    anew = run(*words, "--restart")
    assert anew.returncode == 0, anew.stderr
    assert rows(place / "out.jsonl")[3]["y"] == 27
    text = (place / "in.jsonl").read_text()
    (place / "in.jsonl").write_text(text.replace("row 25", "row 52"))  # as long as it was
    other = run(*words)
    assert other.returncode == 2
    assert "in.jsonl: other content of the same size" in other.stderr


def test_resume_does_not_repeat_a_restart(place: Path) -> None:
    write(place / "in.jsonl", 300)
    words = (*SLOW, "--output", "out.jsonl", "--chunk-rows", "50", "--restart")
    with running(*words) as process:
        wait_for(lambda: len(notes(place)) > 150)
        os.kill(process.pid, signal.SIGKILL)
    command = [sys.executable, "-m", "muster", "resume", str(run_folder(place))]
    again = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert again.returncode == 0, again.stderr
    assert len(notes(place)) <= 300 + 2 * 4


def test_a_place_that_cannot_be_written_is_told_before_the_work(place: Path) -> None:
    write(place / "in.jsonl", 3)
    done = run("stages.py:square", "--input", "in.jsonl", "--output", "/proc/nope/out.jsonl")
    assert done.returncode == 3
    assert "--output" in done.stderr
    assert not (place / "runs").exists()


def test_an_output_of_somebody_else_is_not_touched(place: Path) -> None:
    write(place / "in.jsonl", 10)
    (place / "out.jsonl").write_text("precious\n")
    words = ("stages.py:square", "--input", "in.jsonl", "--output", "out.jsonl", *ON)
    refused = run(*words)
    assert refused.returncode == 2
    assert "exists and was not made by this run" in refused.stderr
    assert (place / "out.jsonl").read_text() == "precious\n"
    assert run(*words, "--overwrite").returncode == 0
    assert len(rows(place / "out.jsonl")) == 10


@pytest.mark.quick
@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["stages.py:square", "--output", "o.jsonl"], "There is nothing to read"),
        (["stages.py:square", "--input", "in.jsonl"], "no place for the result"),
        (["stages.py:square", "--input", "-", "--output", "o.jsonl"], "neither standard input"),
        (["stages.py:square", "--input", "in.jsonl", "--output", "-"], "neither standard input"),
        (["stages.py:square", "--input", "no.jsonl", "--output", "o.jsonl"], "no.jsonl"),
        (["stages.py:square", "--input", "empty.jsonl", "--output", "o.jsonl"], "empty"),
        (["stages.py:square", "--input", "wide.jsonl", "--output", "o.jsonl"], "UTF-16"),
        (["stages.py:square", "--input", "in.jsonl", "--output", "o.xyz"], "xyz"),
        (["stages.py:nothing", "--input", "in.jsonl", "--output", "o.jsonl"], "nothing"),
        (["resoning", "--input", "in.jsonl", "--output", "o.jsonl"], "did you mean 'reasoning'"),
        (["--input", "in.jsonl"], "There is no pipeline to run"),
        (
            ["stages.py:square", "--input", "in.jsonl", "--output", "o.jsonl", "--where", "z>1"],
            "z",
        ),
        (
            ["stages.py:square", "--input", "in.jsonl", "--output", "o.jsonl",
             "--max-worker-memory", "much"],
            "--max-worker-memory much",
        ),
    ],
)  # fmt: skip
def test_mistakes_are_told_before_anything_starts(
    place: Path, muster_main: MusterCli, words: list[str], text: str
) -> None:
    write(place / "in.jsonl", 3)
    (place / "empty.jsonl").write_text("")
    (place / "wide.jsonl").write_text('{"x": 1}\n', encoding="utf-16")
    done = muster_main("map", *words)
    assert done.returncode == 2, done.stdout + done.stderr
    assert text in done.stderr
    assert "Traceback" not in done.stderr
    assert not (place / "o.jsonl").exists()
    assert not (place / "runs").exists()


def test_a_malformed_line_is_named_by_file_and_line(place: Path) -> None:
    write(place / "in.jsonl", 20)
    with (place / "in.jsonl").open("ab") as file:
        file.write(b'{"x": 1,,}\n{"x": "\xff"}\n[1]\n{"x": 23}\n')
    done = run("stages.py:some", "--input", "in.jsonl", "--output", "out.jsonl", *ON)
    assert done.returncode == 1
    errors = rows(run_folder(place) / "errors.jsonl")
    assert [error["row"] for error in errors] == [20, 21, 22]
    for line, error in zip((21, 22, 23), errors, strict=True):
        assert error["stage"] == "read"
        assert f"in.jsonl, line {line}" in error["reason"]


@pytest.mark.quick
def test_a_dry_run_starts_nothing(place: Path, muster_main: MusterCli) -> None:
    write(place / "in.jsonl", 640)
    words = ("stages.py:square", "--input", "in.jsonl", "--output", "out.jsonl", "--dry-run")
    done = muster_main("map", *words, *ON, "--json")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert (plan["records"], plan["chunks"], plan["is_new"]) == (640, 2, True)
    assert "x" in plan["columns"]
    assert not (place / "runs").exists()
