"""Programs log numbers to a file; the worker forwards it, and no kill doubles or loses a line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.unit.farm.test_metric_stream import Sent

import muster
from muster.base.errors import UsageError
from muster.base.metric_log import PROCESS, mark_start, read_line
from muster.base.settings import child_environment
from muster.farm import metrics
from muster.farm.ledger.read import LedgerReader
from muster.farm.metrics import parse_source
from muster.farm.worker.gather import Follower
from muster.run.folder import RunFolder

PROGRAM = """
import json, os, sys
import muster

muster.log(0, loss=1.0)
if sys.argv[1] == "others":  # as a program of another language does it
    with open(os.environ["MUSTER_METRICS"], "a") as file:
        print(json.dumps({"step": 1, "loss": 0.5}), file=file)
        print("no JSON", file=file)
        print(json.dumps({"loss": 0.25, "note": "no number"}), file=file, end="")
"""


class Ledger(Sent):
    """Keeps frames as the ledger does: by task, token and serial, each once."""

    def __init__(self) -> None:
        super().__init__()
        self.frames: dict[tuple[int, int], bytes] = {}

    def logged(self, task_id: int, token: int, body: bytes, serial: int | None = None) -> int:
        assert serial is not None
        self.frames.setdefault((token, serial), body)
        return serial

    def curve(self) -> list[tuple[int, float]]:
        frames = [(token, metrics.decode(body)) for (token, _), body in self.frames.items()]
        found = metrics.effective(frames)
        assert PROCESS not in found
        return list(zip(found["loss"].step.tolist(), found["loss"].value.tolist(), strict=True))

    def steps(self) -> list[int]:
        return [step for step, _ in self.curve()]


def line(step: int) -> str:
    return json.dumps({"step": step, "loss": 0.5}) + "\n"


@pytest.mark.parametrize("begins_at", [0, 3, 5])
@pytest.mark.parametrize("lost", [0, 1, 2])
def test_the_next_attempt_forwards_what_the_killed_one_has_written(
    lost: int, begins_at: int, tmp_path: Path
) -> None:
    """Two frames were sent, of which the coordinator lost some, and two lines were not sent."""
    folder, ledger = RunFolder(tmp_path), Ledger()
    first = Follower(folder, "k", 1, 1, ledger)
    with first.path.open("a") as file:
        file.write('{"step": 0, "of_the_first": 1}\n')
        for steps in ((0, 1), (2,)):
            file.write("".join(map(line, steps)))
            file.flush()
            first._forward()
        file.write(line(3) + line(4))
    for key in list(ledger.frames)[2 - lost :]:
        del ledger.frames[key]
    with Follower(folder, "k", 1, 2, ledger) as second, second.path.open("a") as file:
        file.write("".join(map(line, range(begins_at, 8))))
    assert ledger.steps() == list(range(8))
    assert second.last == {"loss": 0.5}, "results of the command: of this attempt alone"


@pytest.mark.parametrize("lost", [0, 1, 3, 9])
def test_a_program_that_is_started_again_in_an_attempt_replaces_its_steps(
    lost: int, tmp_path: Path
) -> None:
    """It goes on from a checkpoint, then afresh; then all are killed. The coordinator has lost the
    last frames."""
    ledger = Ledger()
    first = Follower(RunFolder(tmp_path), "k", 1, 1, ledger)
    starts = [(0, 5, 1.0), (3, 6, 2.0), (0, 4, 3.0), (2, 5, 4.0)]
    for number, (begin, end, value) in enumerate(starts):
        mark_start(first.path)
        with first.path.open("a") as file:
            file.writelines(
                json.dumps({"step": s, "loss": value}) + "\n" for s in range(begin, end)
            )
            file.write('{"step": 9, "lo')  # torn
        if number != 1:  # two starts come in one look
            first._forward()
    for key in list(ledger.frames)[-lost:] * bool(lost):
        del ledger.frames[key]
    expected = [3.0, 3.0, 4.0, 4.0, 4.0]
    with Follower(RunFolder(tmp_path), "k", 1, 2, ledger):
        pass
    assert ledger.curve() == [*enumerate(expected)]
    with Follower(RunFolder(tmp_path), "k", 1, 3, ledger) as third:
        third.path.write_text(line(4) + '{"loss": 0.25}\n')
    assert ledger.curve() == [(0, 3.0), (4, 0.5), (1, 0.25)]


def test_no_line_of_a_program_fails_its_task(tmp_path: Path) -> None:
    ledger = Ledger()
    lines = [line(0), "[" * 100_000 + "\n", '{"\\udcff": 1}\n', '{"a": 1%s}\n' % ("0" * 400)]
    with Follower(RunFolder(tmp_path), "k", 1, 1, ledger) as follower:
        follower.path.write_text("".join([*lines, line(4)]))
    assert ledger.steps() == [0, 4]
    with Follower(RunFolder(tmp_path), "k", 1, 2, ledger) as follower:
        follower.path.write_text(json.dumps({str(n): 1 for n in range(70_000)}))  # too many names
    assert ledger.steps() == [0, 4]


def test_what_a_line_may_hold() -> None:
    assert read_line(b'{"step": 3, "a": 1, "b": true, "c": NaN}', 0) is not None
    assert read_line(b'{"loss": 1e-3, "name": "x", "_time": 5}', 7) == (7, 5.0, {"loss": 1e-3})
    assert read_line(b'{"step": 3.0, "a": 1}', 0) == (3, None, {"a": 1.0})
    large = (b"[" * 100_000, b'{"a": 1%s}' % (b"0" * 400), b'{"step": 1e300, "a": 1}')
    few = (b"", b"[1]", b"{", b'{"step": "x", "a": 1}', b'{"step": 0.5, "a": 1}')
    for wrong in (*large, *few):
        assert read_line(wrong, 0) is None


def test_log_does_nothing_where_muster_is_not(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import muster\nmuster.log(0, loss=1.0)\n")
    subprocess.run([sys.executable, "program.py"], cwd=tmp_path, check=True, timeout=300)
    assert [path.name for path in tmp_path.iterdir()] == ["program.py"]


@pytest.mark.parametrize("how", ["python", "others"])
def test_programs_of_a_sweep_log_numbers(how: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, f"{tmp_path}/program.py", "{how}"]
    run = muster.sweep(command, grid={"how": [how]}, run_dir=tmp_path / "run", executor="inline")
    folder = RunFolder(run.path)
    with LedgerReader(folder.ledger) as reader:
        curve = metrics.curves_of(reader, 1)["loss"]
    expected = [(0, 1.0), (1, 0.5), (3, 0.25)] if how == "others" else [(0, 1.0)]
    assert list(zip(curve.step.tolist(), curve.value.tolist(), strict=True)) == expected
    assert list(folder.points.iterdir()) == []
    assert [row["loss"] for row in run.results().to_pylist()] == [expected[-1][1]], "the last"


def test_log_in_a_function_is_the_tasks(tmp_path: Path) -> None:
    source = "import muster\n\ndef f(x: int):\n    muster.log(4, loss=x)\n"
    (tmp_path / "target.py").write_text(source)
    target, grid = f"{tmp_path}/target.py:f", {"x": [3]}
    run = muster.sweep(target, grid=grid, run_dir=tmp_path / "run", executor="inline")
    with LedgerReader(RunFolder(run.path).ledger) as reader:
        assert metrics.curves_of(reader, 1)["loss"].value.tolist() == [3.0]


PRINTS = """
import sys, time
print("epoch 1 loss=0.5 of 3", flush=True)
print("epoch 2 loss=nan", end="\\r")
sys.stdout.write("epoch 4 loss=1e-3")
if sys.argv[1] == "2":
    import json, os
    with open(os.environ["MUSTER_TASK_DIR"] + "/result.json", "w") as file:
        json.dump({"loss": 7, "accuracy": 0.5}, file)
"""


def test_numbers_are_read_from_what_a_command_prints(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PRINTS)
    command = [sys.executable, f"{tmp_path}/program.py", "{x}"]
    source = r"stdout:epoch (?P<step>\d+) loss=(?P<loss>\S+)"
    run = muster.sweep(
        command, grid={"x": [1, 2]}, run_dir=tmp_path / "run", devices="cpu:1", metrics_from=source
    )
    results = [(row["loss"], row["accuracy"]) for row in run.results().to_pylist()]
    assert results == [(1e-3, None), (7, 0.5)], "the last that was read, or what the program gave"
    found = run.metrics("1").to_pylist()
    assert [row["step"] for row in found] == [1, 2, 4]
    assert (found[0]["value"], str(found[1]["value"]), found[2]["value"]) == (0.5, "nan", 1e-3)


@pytest.mark.thorough
def test_numbers_are_read_from_event_files(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import os, sys\n"
        "from torch.utils.tensorboard import SummaryWriter\n"
        "for part in range(2):\n"
        "    board = SummaryWriter(os.environ['MUSTER_TASK_DIR'] + f'/tb/{part}')\n"
        "    for step in range(3):\n"
        "        board.add_scalar('train/loss', 0.5 * step, 10 * part + step)\n"
        "    board.close()\n"
    )
    command = [sys.executable, f"{tmp_path}/program.py", "{x}"]
    run = muster.sweep(
        command, grid={"x": [1]}, run_dir=tmp_path / "run", devices="cpu:1",
        metrics_from="tensorboard:tb",
    )  # fmt: skip
    found = [(row["name"], row["step"], row["value"]) for row in run.metrics().to_pylist()]
    steps = [(10 * part + step, 0.5 * step) for part in range(2) for step in range(3)]
    assert found == [("train/loss", step, value) for step, value in steps]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("stdin:x", "this is not a source of numbers"),
        ("stdout:", "this is not a source of numbers"),
        ("stdout:(", "the pattern is invalid"),
        (r"stdout:(?P<step>\d+)", "the pattern names no metric"),
        ("tensorboard:/tmp", "is not below the folder of each task"),
        ("tensorboard:tb/../..", "is not below the folder of each task"),
    ],
)
def test_a_source_that_makes_no_sense_is_refused(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        parse_source(text)


def test_what_is_printed_without_a_log_is_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--on inline has none"):
        muster.sweep(
            ["echo", "{x}"], grid={"x": [1]}, run_dir=tmp_path / "run", executor="inline",
            metrics_from=r"stdout:(?P<loss>\d+)",
        )  # fmt: skip
    assert not (tmp_path / "run").exists()


@pytest.mark.thorough
@pytest.mark.parametrize("task", ["", "task.jsonl"])
def test_under_muster_run_rank_0_writes_the_runs_numbers(task: str, tmp_path: Path) -> None:
    """Or those of its task; and a program in another language may go by the variable alone."""
    program = "import os, muster\nmuster.log(3, rank=int(os.environ['RANK']))\n"
    alone = "if name := os.environ.get('MUSTER_METRICS'):\n    print('{}', file=open(name, 'a'))\n"
    (tmp_path / "program.py").write_text(program + alone)
    words = ["run", "--devices", "cpu:2", "--run-dir", "r", "--quiet", "program.py"]
    env = child_environment({"MUSTER_METRICS": task and str(tmp_path / task)})
    subprocess.run(
        [sys.executable, "-m", "muster", *words], cwd=tmp_path, check=True, timeout=300, env=env
    )
    if task:
        assert (tmp_path / task).read_text().splitlines()[1:] == ["{}"]
        return
    [row] = muster.Run(tmp_path / "r").metrics().to_pylist()
    assert (row["name"], row["step"], row["value"], row["attempt"]) == ("rank", 3, 0.0, 1)
