"""An experiment of a training, a sweep, a map and a program, each of which needs the one before."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.conftest import MusterCli

PHASES = ("teacher", "student", "label", "measure")
FILES = {
    "model.py": """
import os, time
import torch
from torch import nn
from torch.utils.data import TensorDataset
import muster

class Model(muster.Task):
    defaults = {"batch_size": 8, "epochs": 2}

    def model(self):
        return nn.Linear(4, 1)

    def dataset(self, split):
        x = torch.arange(128.0).reshape(32, 4) / 128
        return TensorDataset(x, x.sum(1)) if split == "train" else None

    def loss(self, model, batch):
        time.sleep(float(os.environ.get("SLOW", 0)))
        return (model(batch[0])[:, 0] - batch[1]).square()

    def score(self, model, batch):
        return {"loss": self.loss(model, batch)}

    def finish(self, model, folder):
        torch.save(model.state_dict(), os.path.join(folder, "weights.pt"))
""",
    "work.py": """
import os, time
from pathlib import Path

def hold():
    while Path(os.environ.get("HELD", "no such file")).exists():
        time.sleep(0.01)

def student(teacher: str, lr: float) -> dict:
    with open("calls.txt", "a") as calls:
        calls.write(f"student {lr}\\n")
    return {"size": Path(teacher).stat().st_size, "score": -lr}

def stage(record):
    if record["a"] > 1:  # of the second chunk
        hold()
    return {**record, "b": record["a"] + 1}
""",
    "measure.py": """
import sys
from pathlib import Path
import work

labels, lr, place = sys.argv[1:]
work.hold()
Path(place).write_text(f"{len(Path(labels).read_text().splitlines())} {lr}")
""",
    "in.jsonl": "".join(f'{{"a": {n}}}\n' for n in range(6)),
    "e.toml": """
devices = "cpu:1"
monitor_interval = 0

[phase.measure]
command = "run"
program = ["measure.py", "${label.labels}", "${student.best.lr}", "count.txt"]
requires = ["${label.labels}"]
produces.count = "count.txt"

[phase.label]
command = "map"
target = "work.py:stage"
input = "in.jsonl"
output = "${dir}/labels.jsonl"
chunk_rows = 2
after = ["student"]
produces.labels = "${dir}/labels.jsonl"

[phase.student]
command = "sweep"
target = "work.py:student"
best = "maximize score"
grid = { teacher = ["${teacher.weights}"], lr = [0.1, 0.2] }

[phase.teacher]
command = "train"
target = "model.py:Model"
checkpoint_interval = "2steps"
produces.weights = "${dir}/model/weights.pt"
""",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The experiment once through; each test removes what it does again."""
    place = tmp_path_factory.mktemp("kinds")
    for name, text in FILES.items():
        (place / name).write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "muster", "start", "e.toml", "--json"],
        cwd=place, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert (place / "count.txt").read_text() == "6 0.1"
    return place


def has(pattern: str) -> Callable[[Path], object]:
    return lambda runs: list(runs.glob(pattern))


def has_ended(phase: str) -> Callable[[Path], object]:
    def look(runs: Path) -> bool:
        lines = (runs / "phases.jsonl").read_text().splitlines()
        last = [json.loads(line) for line in lines if line.endswith("}")]
        since = last[max(n for n, line in enumerate(last) if line["event"] == "start") :]
        return any(line["event"] == "end" and line["phase"] == phase for line in since)

    return look


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("phase", "is_there", "number"),
    [
        pytest.param("teacher", has("teacher/checkpoints/step-*"), signal.SIGKILL, marks=slow),
        ("label", has_ended("student"), signal.SIGKILL),
        ("label", has("label/parts/*/*.jsonl"), signal.SIGKILL),
        pytest.param("label", has("label/parts/*/*.jsonl"), signal.SIGINT, marks=slow),
        ("measure", has("measure/logs/rank-0.log"), signal.SIGKILL),
        pytest.param("measure", has("measure/logs/rank-0.log"), signal.SIGINT, marks=slow),
    ],
)
def test_ended_in_or_before_a_phase_it_goes_on_there(
    place: Path, phase: str, is_there: Callable[[Path], object], number: signal.Signals,
    muster_main: MusterCli,
) -> None:  # fmt: skip
    """``phase``: the first that is done anew; it is ended once ``is_there``, and held till then."""
    runs, first = place / "runs" / "e", PHASES.index(phase)
    for name in PHASES[first:]:
        shutil.rmtree(runs / name)
    (place / "count.txt").unlink()
    kept = {name: (runs / name / "run.json").stat().st_mtime_ns for name in PHASES[:first]}
    calls = (place / "calls.txt").read_text()
    words = [sys.executable, "-m", "muster", "start", "e.toml"]
    held, events = place / "held", runs / phase / "events.jsonl"
    held.touch()
    with (place / "said.txt").open("w") as said:
        process = subprocess.Popen(
            words, cwd=place, stdout=said, stderr=said, start_new_session=True,
            env={**os.environ, "SLOW": "0.4", "HELD": str(held)},
        )  # fmt: skip
        try:
            deadline = time.monotonic() + 120
            while not is_there(runs) and time.monotonic() < deadline:
                time.sleep(0.005)
            assert process.poll() is None, (place / "said.txt").read_text()
        finally:
            process.send_signal(number)
            if number == signal.SIGINT:  # it lets what is in hand end
                while process.poll() is None and '"wish"' not in events.read_text():
                    time.sleep(0.005)
                held.unlink()
            code = process.wait()
    shown = json.loads(muster_main("status", "e", "--json", folder=place).stdout)
    states = {one["name"]: one["state"] for one in shown["phases"]}
    assert [states[name] for name in PHASES[:first]] == ["done"] * first
    assert "done" not in [states[name] for name in PHASES[first:]], states
    if number == signal.SIGINT:
        text = (place / "said.txt").read_text()
        assert code in (75, 130) and "muster resume runs/e\n" in text, text
        assert f"resume runs/e/{phase}" not in text
    done = muster_main("start", "e.toml", "--quiet", folder=place)
    assert done.returncode == 0, done.stderr
    shown = json.loads(muster_main("status", "e", "--json", folder=place).stdout)
    assert [one["state"] for one in shown["phases"]] == ["done"] * 4
    assert (place / "count.txt").read_text() == "6 0.1"
    assert len((runs / "label" / "labels.jsonl").read_text().splitlines()) == 6
    assert kept == {name: (runs / name / "run.json").stat().st_mtime_ns for name in kept}
    if first > PHASES.index("student"):
        assert (place / "calls.txt").read_text() == calls


def test_a_map_of_a_file_may_replace_its_output(tmp_path: Path, muster_main: MusterCli) -> None:
    """Only at a start that says so; the flag is for one start, and for maps."""
    for name in ("work.py", "in.jsonl"):
        (tmp_path / name).write_text(FILES[name])
    text = 'command = "map"\ntarget = "work.py:stage"\ninput = "in.jsonl"\noutput = "o.jsonl"\n'
    other = 'command = "sweep"\ntarget = "work.py:hold"\n'
    (tmp_path / "one.toml").write_text(f'on = "inline"\n{text}')
    (tmp_path / "two.toml").write_text(f'on = "inline"\n[phase.a]\n{text}[phase.b]\n{other}')
    (tmp_path / "b.toml").write_text(f'on = "inline"\n{other}')
    for name in ("one.toml", "two.toml"):
        (tmp_path / "o.jsonl").write_text("not ours\n")
        refused = muster_main("start", name)
        assert refused.returncode == 2 and "--overwrite" in refused.stderr, refused.stderr
        assert (tmp_path / "o.jsonl").read_text() == "not ours\n"
        done = muster_main("start", name, "--overwrite", "--quiet")
        assert done.returncode == 0, done.stderr
        assert len((tmp_path / "o.jsonl").read_text().splitlines()) == 6
        again = muster_main("start", name, "--quiet")
        assert again.returncode == 0, again.stderr
    refused = muster_main("start", "b.toml", "--overwrite")
    assert refused.returncode == 2 and "nothing here is a map" in refused.stderr
