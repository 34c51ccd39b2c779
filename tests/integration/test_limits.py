"""Limits: a run pauses by itself, says why, and goes on with more."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from tests.programs import read_program

from muster.api.experiments.watching import end_of
from muster.api.runs import Run
from muster.api.start import limits
from muster.api.start.limits import (
    Idle,
    LimitOptions,
    LimitReached,
    idle_of,
    limited,
    refuse_to_begin,
    when_is,
)
from muster.base.errors import UsageError
from muster.base.signals import Requests, listening
from muster.monitor.files import csv_header, to_csv
from muster.monitor.sample import Row
from muster.run.folder import RunFolder
from muster.run.session import Session

MusterMain = Callable[..., subprocess.CompletedProcess[str]]
TASK = "import time\ndef f(x: int):\n    time.sleep(0.25)\n    return x\n"


def test_a_sweep_pauses_and_goes_on_with_more(tmp_path: Path, muster_main: MusterMain) -> None:
    (tmp_path / "job.py").write_text(TASK)
    line = (
        "sweep job.py:f --grid x=1,2,3,4,5,6,7,8,9 --on inline --devices cpu:1 --run-dir run "
        "--monitor-interval 0"
    ).split()
    first = muster_main(*line, "--max-gpu-hours", "0.0001")
    assert first.returncode == 75, first.stderr
    assert "GPU hours are used, of --max-gpu-hours 0.0001: the run pauses" in first.stderr
    assert "Go on: muster resume run" in first.stdout
    said = muster_main("wait", "run")
    assert said.returncode == 75 and "of --max-gpu-hours 0.0001); go on:" in said.stdout
    again = muster_main(*line, "--max-cost", "0.0001", "--price-per-gpu-hour", "1")
    assert again.returncode == 75, "the hours of all starts count"
    assert "It has cost 0.00, of --max-cost 0.0001. Nothing was begun." in again.stderr
    assert "To go on with a higher --max-cost: muster resume run" in again.stderr
    more = ("--max-cost", "9", "--price-per-gpu-hour", "1")
    done = muster_main("resume", "run", "--max-gpu-hours", "1", *more)
    assert done.returncode == 0, done.stderr
    over = muster_main(*line, "--max-gpu-hours", "0.0001")
    assert over.returncode == 0, "nothing is left that could use more"
    assert json.loads((tmp_path / "run" / "spent.json").read_bytes())["gpu_hours"] > 0.0001


#: A run of every kind that takes longer than its limit allows.
KINDS = {
    "train": "train task.py:Slow --epochs 4000 --devices cpu:1 --grace 60 --run-dir run",
    "map": "map s.py:f --input in.jsonl --output o.jsonl --chunk-rows 1 --devices cpu:1 "
    "--run-dir run",
    "stages": "map s.py:both --input in.jsonl --output o.jsonl --chunk-rows 1 --stage-by-stage "
    "--devices cpu:1 --run-dir run",
    "search": "sweep s.py:g --space x=uniform(0,1) --maximize y --trials 40 --devices cpu:1 "
    "--run-dir run",
    "agent": "train ppo --num-steps 100000000 --devices cpu:1 --grace 60 --run-dir run",
    "run": "run --devices cpu:1 --grace 60 --run-dir run p.py",
    "experiment": "start e.toml",
}
SOURCES = {
    "s.py": """import time
def f(r):
    time.sleep(1)
    return r
def same(r):
    return r
both = [f, same]
def g(x: float):
    time.sleep(1)
    return {"y": x}
""",
    "p.py": """import json, pathlib, signal, sys, time
def save(*_):
    place = pathlib.Path(__file__).parent / "run"
    (place / "ending.json").write_text(json.dumps({"ending": "requeue"}))
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
time.sleep(300)
""",
    "e.toml": """run_dir = "run"
devices = "cpu:1"
max_gpu_hours = 0.0004
[phase.one]
command = "sweep"
target = "s.py:g"
grid.x = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
[phase.two]
command = "sweep"
target = "s.py:g"
grid.x = [1.0]
after = ["one"]
""",
}


@pytest.mark.parametrize(
    "kind", [name if name == "train" else pytest.param(name, marks=pytest.mark.slow)
             for name in KINDS]
)  # fmt: skip
def test_every_kind_pauses(kind: str, tmp_path: Path, muster_main: MusterMain) -> None:
    (tmp_path / "task.py").write_text(read_program("slow_task.py"))
    for name, source in SOURCES.items():
        (tmp_path / name).write_text(source)
    (tmp_path / "in.jsonl").write_text('{"a": 1}\n' * 30)
    hours = "0.003" if kind == "run" else "0.0004"  # a program has to come to its handler first
    limit = () if kind == "experiment" else ("--max-gpu-hours", hours)
    first, *rest = KINDS[kind].split()
    done = muster_main(first, *limit, *rest)
    assert done.returncode == 75, (done.stdout, done.stderr)
    assert f"of --max-gpu-hours {hours}: the run pauses" in done.stderr + done.stdout
    if kind in ("run", "experiment"):  # the command itself goes on with it
        again = muster_main(first, *limit, *rest)
        assert again.returncode == 75 and "Nothing was begun" in again.stderr, again
        return
    over = (datetime.now() - timedelta(seconds=9)).isoformat(timespec="seconds")
    late = muster_main("resume", "run", "--max-gpu-hours", "1", "--until", over)
    assert late.returncode == 75 and f"It is --until {over}. Nothing" in late.stderr
    again = muster_main("resume", "run")
    assert again.returncode == 75 and "Nothing was begun" in again.stderr


@pytest.mark.quick
@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("sweep job.py:f --grid x=1 --max-gpu-hours 0", "greater than 0"),
        ("sweep job.py:f --grid x=1 --max-cost 3", "--price-per-gpu-hour"),
        ("sweep job.py:f --grid x=1 --until noon", "noon is not a time"),
        ("sweep job.py:f --grid x=1 --min-utilisation 10", "not a share of busy time"),
        ("sweep job.py:f --grid x=1 --min-utilisation 10%:1h --devices cpu:1", "has no GPUs"),
        ("run --on slurm --gpus 1 --max-gpu-hours 3 job.py", "--time"),
        ("sweep job.py:f --seeds 2 --on slurm --array 2 --until 08:00", "of an array"),
        ("map job.py:f --input i.jsonl --output o.jsonl --max-cost 3", "--price-per-gpu-hour"),
        ("verify digits --max-cost 3", "has no flag --max-cost"),
    ],
)
def test_a_limit_that_nobody_keeps_is_refused(
    line: str, why: str, tmp_path: Path, muster_main: MusterMain
) -> None:
    (tmp_path / "job.py").write_text("def f(x: int = 0, seed: int = 0):\n    return x\n")
    (tmp_path / "i.jsonl").write_text('{"a": 1}\n')
    done = muster_main(*line.split(), "--dry-run" if "verify" not in line else "--quiet")
    if "no GPUs" in why:
        done = muster_main(*line.split())
    assert done.returncode == 2 and why in done.stderr, done.stderr


@pytest.mark.quick
def test_times_and_shares_are_read() -> None:
    now = datetime(2026, 1, 31, 9, 0)
    assert when_is("09:30", now) == datetime(2026, 1, 31, 9, 30)
    assert when_is("9:00", now) == datetime(2026, 2, 1, 9, 0)
    assert when_is("2026-01-30T08:00", now) == datetime(2026, 1, 30, 8, 0)
    assert idle_of("7.5%:30m") == Idle(7.5, 1800.0) and idle_of("10:90").seconds == 90
    for text in ("25:00", "8", "tomorrow"):
        with pytest.raises(UsageError, match="is not a time"):
            when_is(text, now)
    for text in ("0%:1h", "101%:1h", "10%", "10%:", "x:1h"):
        with pytest.raises(UsageError):
            idle_of(text)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("percent", "pauses"), [(3.0, True), pytest.param(40.0, False, marks=pytest.mark.slow)]
)
def test_gpus_that_stand_idle_pause_the_run(percent: float, pauses: bool, tmp_path: Path) -> None:
    folder, said = RunFolder(tmp_path), list[str]()
    options = LimitOptions(min_utilisation="10%:0.6s")
    moments = [datetime.now(UTC) + timedelta(seconds=0.1 * step) for step in range(300)]
    rows = [
        Row(time_utc=when.isoformat(timespec="milliseconds"), elapsed_s=1.0, host="h",
            device=device, utilisation_percent=busy)
        for when in moments
        for device, busy in (("host", 99.0), ("gpu0", percent), ("gpu1", None))
    ]  # fmt: skip
    folder.monitor_csv().write_bytes(csv_header() + to_csv(rows))
    with listening() as requests, requests.watched():
        session = Session(folder, None, None)
        with limited(folder, options, session, requests, lambda: 1, said.append):
            deadline = time.monotonic() + (60 if pauses else 0.8)
            while time.monotonic() < deadline and not requests.heard:
                time.sleep(0.02)
            assert bool(requests.take()) == pauses
    assert ("busy for 3.0 %" in "".join(said)) == pauses


@pytest.mark.quick
@pytest.mark.parametrize("text", ["", "[]", '{"gpu_hours": "x"}', '{"gpu_hours": -3}'])
def test_a_damaged_count_is_none(text: str, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.spent_json.write_text(text)
    options, requests = LimitOptions(max_gpu_hours=1), Requests()
    refuse_to_begin(folder, options, requests, is_new=False)
    folder.spent_json.write_text(json.dumps({"gpu_hours": 2000}))
    with pytest.raises(LimitReached, match=r"^2,000 GPU hours are used"):
        refuse_to_begin(folder, options, requests, is_new=False)
    refuse_to_begin(folder, options, requests, is_new=True)


@pytest.mark.quick
def test_a_time_of_the_day_is_one_moment_for_all_of_a_command(tmp_path: Path) -> None:
    requests = Requests()
    options = LimitOptions(until=(datetime.now() - timedelta(minutes=1)).strftime("%H:%M"))
    refuse_to_begin(RunFolder(tmp_path), options, requests, is_new=False)
    requests.began_s -= 3600  # it has waited for devices, or this is its second stage
    with pytest.raises(LimitReached, match="It is --until"):
        refuse_to_begin(RunFolder(tmp_path), options, requests, is_new=False)


@pytest.mark.quick
def test_a_limit_is_no_second_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_TURN_S", 0.01)
    folder, said = RunFolder(tmp_path), list[str]()
    folder.spent_json.write_text('{"gpu_hours": 2}')
    with listening() as requests, requests.watched():
        requests.note(signal.SIGINT, None)
        assert requests.take() == [signal.SIGINT]
        session, options = Session(folder, None, None), LimitOptions(max_gpu_hours=1)
        with limited(folder, options, session, requests, lambda: 1, said.append):
            time.sleep(0.2)
        assert requests.heard == [] and said == []


@pytest.mark.quick
@pytest.mark.parametrize("is_taken", [True, False])
def test_a_run_that_has_finished_by_then_pauses_nowhere(
    is_taken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "_TURN_S", 0.01)
    folder, said = RunFolder(tmp_path), list[str]()
    folder.spent_json.write_text('{"gpu_hours": 2}')
    with listening() as requests, requests.watched():
        session, options = Session(folder, None, None), LimitOptions(max_gpu_hours=1)
        with limited(folder, options, session, requests, lambda: 1, said.append):
            while not requests.heard:
                time.sleep(0.01)
            if is_taken:
                requests.take()
        assert requests.heard == [] and bool(said) == is_taken
    assert "done or saved, if more is left" in "".join(said) or not is_taken


@pytest.mark.quick
def test_what_is_over_is_refused_before_anything_is_touched(
    tmp_path: Path, muster_main: MusterMain
) -> None:
    (tmp_path / "job.py").write_text(TASK)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "ledger.sqlite").write_text("of an old run")
    line = "sweep job.py:f --grid x=1 --on inline --devices cpu:1 --run-dir run --restart"
    told = ("--notify", f"command:touch {tmp_path}/told")
    done = muster_main(*line.split(), "--until", "2020-01-01T08:00", *told)
    assert done.returncode == 75, done.stderr
    assert "It is --until 2020-01-01T08:00. Nothing was begun." in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job.py", "run"]


@pytest.mark.quick
def test_stages_have_one_amount_and_a_reason_may_hold_a_colon(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert RunFolder(folder.stage(1)).spent_json == folder.spent_json
    elsewhere = RunFolder(tmp_path / "stages" / "mine")
    assert elsewhere.spent_json.parent == elsewhere.path
    stored = {
        "run_id": "1", "name": "a", "kind": "train", "created_s": 1.5, "targets": [],
        "spec": {"program": {"target": "a:b"}, "train": {"task": "t"}, "config": {}},
        "code": {}, "options": {}, "argv": ["muster", "train"], "cwd": "/", "environment": {},
        "format": 1,
    }  # fmt: skip
    folder.run_json.write_text(json.dumps(stored))
    limit = {"event": "limit", "text": "It is --until 08:00: the run pauses."}
    lines = [{"event": "start"}, limit, {"event": "end", "exit_code": 75}]
    folder.events.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert "before all was done (It is --until 08:00);" in end_of(Run(folder.path)).sentence
