"""``muster monitor`` as its user meets it: real processes, terminals, signals and kills."""

from __future__ import annotations

import csv
import json
import re
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import pexpect
import pyarrow.parquet as pq
import pytest

from muster.cli.commands.monitor import UNKNOWN
from muster.cli.main import main

MUSTER = [sys.executable, "-m", "muster"]
FACTS = {
    "devices": [
        {"index": 0, "uuid": "GPU-aa", "name": "NVIDIA A40", "memory_total_mib": 46068,
         "memory_used_mib": 12345,
         "holders": [{"pid": 4100, "user": "ada", "used_mib": 12000, "command": "python fit.py"}]},
        {"index": 1, "uuid": "GPU-bb", "name": "NVIDIA A40", "lost": "fell off the bus"},
    ]
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host without GPU; ``record`` gives it some."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("MUSTER_LEASE_DIR", str(tmp_path / "leases"))
    record(tmp_path, {"devices": [], "problem": "No GPU here."}, monkeypatch)
    return tmp_path


def record(folder: Path, facts: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "facts.json").write_text(json.dumps(facts))
    monkeypatch.setenv("MUSTER_DEVICE_FACTS", str(folder / "facts.json"))


def run(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*MUSTER, *args], cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )


class Here(Protocol):
    def __call__(self, *args: str) -> subprocess.CompletedProcess[str]: ...


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Here:
    """The same command in this process, which saves the start of another."""
    monkeypatch.chdir(folder)

    def call(*args: str) -> subprocess.CompletedProcess[str]:
        capsys.readouterr()
        code = main(args)
        return subprocess.CompletedProcess(args, code, *capsys.readouterr())

    return call


def read(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def wait_for(condition: Any, limit_s: float = 300.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.02)


# ---------------------------------------------------------------------- alone


def test_a_log_of_a_host_without_gpu_and_one_header_after_two_starts(folder: Path) -> None:
    for _ in range(2):
        done = run(
            folder,
            "monitor",
            "--interval",
            "0.1",
            "--duration",
            "0.35",
            "--output",
            "gpu_usage.csv",
        )
        assert done.returncode == 0, done.stderr
        # The first sample knows no rate yet, and a busy machine may have no other.
        assert re.search(rf"cpu (\d+ %|{UNKNOWN}) mem .* GiB", done.stdout)
        assert "\x1b" not in done.stdout
    text = (folder / "gpu_usage.csv").read_text()
    assert text.count("time_utc") == 1
    rows = read(folder / "gpu_usage.csv")
    elapsed = [float(row["elapsed_s"]) for row in rows]
    assert sum(later <= before for before, later in pairwise(elapsed)) == 1, "since each start"
    assert len(rows) <= 8  # at 0, 0.1, 0.2 and 0.3 s, twice; a busy machine misses some
    assert {row["device"] for row in rows} == {"host"}
    assert int(rows[1]["memory_total_mib"]) > 0
    for row in rows:
        assert re.fullmatch(r"20\d\d-\d\d-\d\dT[\d:.]{12}\+00:00", row["time_utc"])


def test_recorded_gpus_and_one_that_is_lost_are_rows(
    folder: Path, here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(folder, FACTS, monkeypatch)
    done = here("monitor", "--interval", "0.1", "--duration", "0.1", "--output", "a.jsonl")
    assert "gpu0 12.1/45.0 GiB" in done.stdout
    assert "gpu1 LOST" in done.stdout
    rows = [json.loads(line) for line in (folder / "a.jsonl").read_text().splitlines()]
    assert [row["device"] for row in rows[:3]] == ["host", "gpu0", "gpu1"]
    assert len(rows) % 3 == 0
    assert rows[1]["processes"] == "pid 4100 ada 12000 MiB"
    assert rows[2]["lost"] == "fell off the bus"


@pytest.mark.quick
def test_json_is_one_document(folder: Path, here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    record(folder, FACTS, monkeypatch)
    done = here("monitor", "--interval", "0.1", "--duration", "0.1", "--json")
    answer = json.loads(done.stdout)
    assert (answer["exit_code"], answer["output"]) == (0, None)
    assert [d["device"] for d in answer["devices"]] == ["host", "gpu0", "gpu1"]
    assert answer["devices"][1]["max_memory_used_mib"] == 12345
    assert answer["devices"][2]["num_lost"] == answer["num_samples"] > 0


@pytest.mark.alone
def test_a_terminal_shows_the_view_and_ctrl_c_ends_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(folder, FACTS, monkeypatch)
    words = [*MUSTER, "monitor", "--interval", "0.2"]
    child = pexpect.spawn(
        words[0], words[1:], cwd=str(folder), dimensions=(30, 120), encoding="utf-8", timeout=300
    )
    child.expect("watched for")
    child.expect(r"CPU")
    child.expect(r"GPU[^\n]*utilisation[^\n]*memory")
    child.expect(r"gpu0[^\n]*12\.1/45\.0 GiB[^\n]*NVIDIA A40")
    child.expect(r"gpu1[^\n]*lost[^\n]*NVIDIA A40")
    child.expect("gpu1 is lost: fell off the bus")
    child.expect(r"4100 +ada +12,000 MiB +python fit\.py")
    child.expect(r"CPU \d+ %")  # a second sample, with rates
    child.sendintr()
    child.expect(r"device[^\n]*samples[^\n]*utilisation")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_kill_9_of_a_monitor_leaves_a_readable_log_that_goes_on(
    folder: Path, here: Here, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    record(folder, FACTS, monkeypatch)
    path = folder / f"log.{suffix}"
    words = [*MUSTER, "monitor", "--interval", "0.05", "--output", str(path)]
    with subprocess.Popen(words, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        num_lines = 20 if suffix == "parquet" else 5
        for _ in range(num_lines):
            process.stdout.readline()
        process.kill()
    if suffix == "parquet":
        assert pq.read_table(path).num_rows >= 12 * 3
    before = json.loads(here("monitor", str(path), "--json").stdout)["num_rows"]
    assert before >= num_lines * 3
    done = here("monitor", "--interval", "0.1", "--duration", "0.1", "--output", str(path))
    assert done.returncode == 0, done.stderr
    assert json.loads(here("monitor", str(path), "--json").stdout)["num_rows"] >= before + 3


# ---------------------------------------------------------------------- a command


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (["true"], 0),
        (["sh", "-c", "exit 7"], 7),
        (["sh", "-c", "kill -9 $$"], 137),
        (["no-such-program-here"], 2),
    ],
)
def test_the_exit_code_of_a_command(folder: Path, command: list[str], code: int) -> None:
    done = run(folder, "monitor", "--interval", "600", "--output", "log.csv", "--", *command)
    assert done.returncode == code
    assert "Traceback" not in done.stderr
    if code != 2:
        assert len(read(folder / "log.csv")) == 2  # at its start and at its end


def test_what_a_command_prints_stays_alone_on_standard_output(folder: Path) -> None:
    done = run(folder, "monitor", "--", "echo", "hello")
    assert done.stdout == "hello\n"
    assert "samples" in done.stderr


def test_sampling_may_end_before_the_command(folder: Path) -> None:
    words = ["monitor", "--interval", "0.1", "--duration", "0.2", "--output", "log.csv"]
    done = run(folder, *words, "--", "sh", "-c", "sleep 0.8; exit 4")
    assert done.returncode == 4
    assert 1 <= len(read(folder / "log.csv")) <= 3  # at 0, 0.1 and 0.2 s


LISTENER = """
import signal, sys, time
heard = []
def hear(number, frame):
    heard.append(number)
    print("hears", int(number), flush=True)
for name in ("SIGTERM", "SIGUSR1", "SIGINT"):
    signal.signal(getattr(signal, name), hear)
print("ready", flush=True)
while signal.SIGTERM not in heard and len(heard) < 2:
    time.sleep(0.02)
    if heard == [signal.SIGINT]:
        time.sleep(0.3)  # a second one would arrive now
        break
print("heard", *map(int, heard), flush=True)
sys.exit(5)
"""


def test_signals_are_passed_on(folder: Path) -> None:
    words = [*MUSTER, "monitor", "--", sys.executable, "-c", LISTENER]
    with subprocess.Popen(
        words, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        first, second = int(signal.SIGUSR1), int(signal.SIGTERM)
        process.send_signal(first)
        assert process.stdout.readline() == f"hears {first}\n"
        process.send_signal(second)
        out, _ = process.communicate(timeout=300)
    assert out == f"hears {second}\nheard {first} {second}\n"
    assert process.returncode == 5


def test_a_typed_ctrl_c_reaches_the_command_once(folder: Path) -> None:
    words = [*MUSTER, "monitor", "--", sys.executable, "-c", LISTENER]
    child = pexpect.spawn(words[0], words[1:], cwd=str(folder), encoding="utf-8", timeout=300)
    child.expect("ready")
    child.sendintr()
    child.expect(r"heard 2\r")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 5


def test_a_disk_that_is_full_does_not_end_the_command(folder: Path) -> None:
    words = ["monitor", "--interval", "0.05", "--output", "log.csv"]
    until_told = "until grep -q Cannot said; do sleep 0.05; done; sleep 0.3; exit 6"
    line = shell_line([*MUSTER, *words, "--", "sh", "-c", until_told])
    done = subprocess.run(
        ["bash", "-c", f"trap '' XFSZ; ulimit -f 1; exec {line} 2> said"],
        cwd=folder, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 6
    assert (folder / "said").read_text().count("Cannot write log.csv") == 1
    assert len(read(folder / "log.csv")) > 2


def test_facts_that_break_do_not_end_the_command(folder: Path) -> None:
    line = "echo broken > facts.json; sleep 1; exit 3"
    done = run(folder, "monitor", "--interval", "0.05", "--", "sh", "-c", line)
    assert done.returncode == 3
    assert done.stderr.count("There are no more samples: The device facts in") == 1


def shell_line(words: list[str]) -> str:
    import shlex

    return shlex.join(words)


# ---------------------------------------------------------------------- beside a run

TASK = """
import json, os, time

def hold(holders):
    facts = json.load(open("facts.json"))
    facts["devices"][0]["holders"] = holders
    with open("facts.new", "w") as file:
        json.dump(facts, file)
    os.replace("facts.new", "facts.json")

def recorded():
    path = "runs/first/monitor.csv"
    return open(path).read() if os.path.exists(path) else ""

def f(i: int, ctx):
    hold([{"pid": os.getpid(), "user": "ada", "used_mib": 900}])
    end_s = time.monotonic() + 120
    while time.monotonic() < end_s and "first/1" not in recorded():
        time.sleep(0.05)  # the picture of the sweep is renewed every second
    hold([])
    return {"task": ctx.task}
"""


def test_a_sweep_records_its_gpu_with_run_and_task_and_is_replayed(
    folder: Path, here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = [{"index": n, "uuid": f"GPU-{n}", "name": "A40"} for n in range(2)]
    record(folder, {"devices": devices}, monkeypatch)
    (folder / "task.py").write_text(TASK)
    words = ["sweep", "task.py:f", "--grid", "i=1", "--gpus", "1", "--run-dir", "runs/first"]
    done = run(folder, *words, "--monitor-interval", "0.2", "--json")
    assert done.returncode == 0, done.stderr
    rows = read(folder / "runs/first/monitor.csv")
    # Only the GPU that it has taken, beside the host.
    assert {row["device"] for row in rows} == {"host", "gpu0"}
    said = {row["processes"] for row in rows if row["device"] == "gpu0"}
    named = r"pid \d+ ada 900 MiB, first/1 \(i=1\)"
    assert any(re.fullmatch(named, text) for text in said), said

    shown = here("monitor", "first")
    assert shown.returncode == 0, shown.stderr
    assert re.search(r"gpu0 +\d+ ", shown.stdout)
    assert (folder / "runs/first/monitor.png").read_bytes().startswith(b"\x89PNG")
    answer = json.loads(here("monitor", "runs/first", "--json").stdout)
    assert answer["num_rows"] == len(rows)
    assert answer["figure"] == "runs/first/monitor.png"


def test_ranks_are_sampled_and_a_second_start_goes_on(folder: Path) -> None:
    words = ["run", "--devices", "cpu:2", "--run-dir", "gang", "--monitor-interval", "0.1"]
    for _ in range(2):
        done = run(folder, *words, "--no-python", "true")
        assert done.returncode == 0, done.stderr
    text = (folder / "gang/monitor.csv").read_text()
    assert text.count("time_utc") == 1
    rows = read(folder / "gang/monitor.csv")
    assert len(rows) > 4
    elapsed = [float(row["elapsed_s"]) for row in rows]
    assert sum(later < before for before, later in pairwise(elapsed)) == 1, "it began again, once"


def test_0_records_nothing_and_the_default_records(folder: Path, here: Here) -> None:
    (folder / "quick.py").write_text("def f(i: int):\n    return {'i': i}\n")
    words = ["sweep", "quick.py:f", "--grid", "i=1", "--devices", "cpu:1", "--quiet"]
    here(*words, "--run-dir", "off", "--monitor-interval", "0")
    assert not (folder / "off/monitor.csv").exists()
    here(*words, "--run-dir", "on")
    assert len(read(folder / "on/monitor.csv")) >= 2  # one at the start, one at the end
    done = here("monitor", "off")
    assert done.returncode == 3
    assert "--monitor-interval 0" in done.stderr


def test_a_run_does_not_suffer_when_its_log_cannot_be_written(folder: Path, here: Here) -> None:
    (folder / "quick.py").write_text("def f(i: int):\n    return {'i': i}\n")
    (folder / "run/monitor.csv").mkdir(parents=True)
    words = ["sweep", "quick.py:f", "--grid", "i=1", "--devices", "cpu:1", "--run-dir", "run"]
    done = here(*words)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("no samples are recorded from here on") == 1


# ---------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["--interval", "0"], 2, "--interval 0 is too short"),
        (["--interval", "often"], 2, "--interval often: cannot read this as a duration"),
        (["--duration", "0"], 2, "leaves no time"),
        (["--output", "log.xlsx"], 2, "format .xlsx is not known"),
        (["--output", "facts.json"], 2, "format .json is not known"),
        (["--output", "taken.csv"], 2, "is not a log of samples"),
        (["--output", "no/such/folder/log.csv"], 3, "No such file or directory"),
        (["--"], 2, "no command after"),
        (["no-such-run"], 2, "Unknown run 'no-such-run'"),
        (["nothing.csv"], 3, "There is no log of samples at nothing.csv"),
        (["taken.csv"], 3, "not a log of samples"),
        (["taken.csv", "--output", "x.csv"], 2, "--output cannot be given with RUN"),
        (["taken.csv", "--", "true"], 2, "a command cannot be given with RUN"),
    ],
)
def test_a_mistake_gets_a_clear_error_and_no_traceback(
    folder: Path, here: Here, args: list[str], code: int, words: str
) -> None:
    (folder / "taken.csv").write_text("a,b\n1,2\n")
    done = here("monitor", *args)
    assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr
    assert words in done.stderr
    assert (folder / "taken.csv").read_text() == "a,b\n1,2\n"
