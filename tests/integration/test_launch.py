"""``muster launch`` in a real terminal, key by key, and without one."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pexpect
import pytest
from tests.conftest import MusterCli

DOWN, ENTER = "\x1b[B", "\r"
BOX = {
    "driver_version": "550.54.15",
    "cuda_driver_version": [12, 4],
    "devices": [
        {"index": n, "uuid": f"GPU-{n}", "name": "NVIDIA A100-SXM4-40GB",
         "memory_total_mib": 40960, "memory_used_mib": 30000 if n == 1 else 0,
         "holders": [{"pid": 41, "user": "ada", "used_mib": 30000}] if n == 1 else []}
        for n in range(3)
    ],
}  # fmt: skip


def start(folder: Path, *args: str) -> pexpect.spawn:
    environment = {**os.environ, "TERM": "xterm"}
    return pexpect.spawn(
        sys.executable, ["-m", "muster", "launch", *args], cwd=str(folder), env=environment,
        dimensions=(40, 130), encoding="utf-8", timeout=300,
    )  # fmt: skip


@pytest.mark.alone
def test_arrow_keys_and_defaults_lead_to_a_training_that_runs(tmp_path: Path) -> None:
    child = start(tmp_path, "--epochs", "1")
    child.expect("kind: The kind of work")
    child.send(ENTER)
    child.expect("target: A recipe .*enter for digits")
    child.send("digits" + ENTER)  # nothing stands there that this would be typed behind
    child.expect("devices: No GPU .*enter for cpu:2")
    child.send(ENTER)
    child.expect("strategy: single on one device")
    child.send(DOWN + DOWN + DOWN + ENTER)  # ddp
    child.expect("batch-size: Samples per rank.*enter for the default")
    child.send(ENTER)
    child.expect("lr: Learning rate.*enter for 0.003")  # the recipe's own, which is never scaled
    child.send(ENTER)
    child.expect("precision: ")
    child.send(ENTER)
    child.expect("run-dir: The run folder.*enter for the default")
    child.send("runs/digits" + ENTER)
    child.expect("args: Flags of digits to set")
    child.send(ENTER)
    child.expect(
        "muster train digits --epochs 1 --devices cpu:2 --strategy ddp --lr 0.003 "
        "--precision auto --run-dir runs/digits"
    )
    child.expect("samples/s", timeout=300)  # the plan's estimate, from steps measured here
    child.expect("rests on")
    child.expect("Run it")
    child.send("y")
    child.expect("strategy   ddp")
    child.expect(pexpect.EOF, timeout=300)
    child.close()
    assert child.exitstatus == 0
    assert (tmp_path / "runs/digits/training_results.json").exists()


@pytest.mark.alone
def test_gpus_are_marked_with_the_space_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = tmp_path / "facts.json"
    facts.write_text(json.dumps(BOX))
    monkeypatch.setenv("MUSTER_DEVICE_FACTS", str(facts))
    child = start(tmp_path, "--kind", "sweep", "--target", "ssm", "--print")
    child.expect("gpu-ids: Which GPUs")
    child.expect("10,960 MiB free of 40,960")
    child.send(" " + ENTER)  # takes the mark from GPU 0; 1 is busy and never had one
    child.expect("run-dir: The run folder")
    child.send(ENTER)
    child.expect("args: Flags of ssm to set")
    child.send(ENTER)
    child.expect("muster sweep ssm --gpu-ids 2\r")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0


@pytest.mark.alone
@pytest.mark.parametrize("leave", [pexpect.spawn.sendintr, pexpect.spawn.sendeof])
def test_a_wrong_answer_is_told_at_once_and_leaving_starts_nothing(
    leave: Callable[[pexpect.spawn], None], tmp_path: Path
) -> None:
    child = start(tmp_path, "--kind", "run")
    child.expect("target: A Python file")
    child.send("nowhere.py" + ENTER)
    child.expect("There is no script nowhere.py")
    child.send("\x15")  # Ctrl-U: Ctrl-D leaves an empty line only
    leave(child)
    child.expect("Nothing was started")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 130


@pytest.mark.quick
def test_without_a_terminal_flags_are_enough(muster_main: MusterCli) -> None:
    done = muster_main(
        "launch", "--kind", "train", "--target", "digits", "--devices", "cpu:1", "--print"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("muster train digits --devices cpu:1 --lr 0.003 ")


@pytest.mark.quick
def test_a_sweep_that_would_be_refused_is_not_proposed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, muster_main: MusterCli
) -> None:
    """It printed `muster sweep work.py:f`, which the function cannot be called by, as good."""
    monkeypatch.chdir(tmp_path)
    Path("work.py").write_text("def f(lr: float): return lr\n")
    words = ("launch", "--kind", "sweep", "--target", "work.py:f", "--devices", "cpu:1", "--print")
    done = muster_main(*words)
    assert done.returncode == 2 and "needs a value for lr" in done.stderr
    assert muster_main(*words, "--grid", "lr=1,2").returncode == 0


@pytest.mark.quick
def test_without_a_terminal_what_is_missing_is_named(muster_main: MusterCli) -> None:
    done = muster_main("launch", "--kind", "sweep", "--print")
    assert done.returncode == 2
    assert "--target" in done.stderr and "Traceback" not in done.stderr
    done = muster_main("launch", "--kind", "train", "--devices", "cpu:1")
    assert done.returncode == 2
    assert "--yes" in done.stderr
