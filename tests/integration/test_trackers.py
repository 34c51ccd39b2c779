"""``--log-to``: what real trackers have of a sweep and of a training."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tests.conftest import MusterCli
from tests.ports import free_port
from tests.tracked import READERS, gang_folder, in_mlflow, in_tensorboard, logged

from muster.api.trackers.guard import track
from muster.base.errors import SetupError
from muster.run.folder import RunFolder

ALL = "tensorboard,wandb,mlflow,trackio"
PROGRAM = """\
import os, signal
from pathlib import Path

def curve(ctx, lr: float):
    for step in range(4):
        ctx.log(step, loss=lr * step)
    if lr == 0.5 and not Path("once").exists():
        Path("once").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    ctx.log(4, loss=lr * 4)
    if lr == 0.25:
        raise ValueError("too small")
    return {"accuracy": lr, "note": "good"}
"""
STEPS = range(5)


@pytest.fixture(autouse=True)
def _at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    for name in ("MLFLOW_TRACKING_URI", "WANDB_MODE", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)


def test_a_sweep_with_a_repeated_and_a_failed_task(tmp_path: Path, muster_cli: MusterCli) -> None:
    (tmp_path / "curve.py").write_text(PROGRAM)
    words = ("sweep", "curve.py:curve", "--grid", "lr=0.25,0.5,1.0", "--devices", "cpu:1")
    done = muster_cli(*words, "--run-dir", "run", "--monitor-interval", "0", "--log-to", "wandb")
    assert done.returncode == 1, done.stderr
    folder = RunFolder(tmp_path / "run")
    assert json.loads(folder.run_json.read_text())["options"]["log_to"] == ["wandb"]
    # The others catch up afterwards; what W&B has is not sent again.
    assert muster_cli("track", "run", "--log-to", ALL).returncode == 0
    for name, read in READERS.items():
        curves = read(folder)
        found = sorted(run["loss"][-1][1] for run in logged(curves).values())
        assert found == [1.0, 2.0, 4.0], name
        for run in logged(curves).values():
            assert [step for step, _ in run["loss"]] == list(STEPS), name
        if name != "wandb":  # it has them in the summary
            results = sorted(run["result/accuracy"] for run in curves.values() if len(run) > 1)
            assert [value for ((_, value),) in results] == [0.5, 1.0], name
    assert _states(folder) == ["FAILED", "FINISHED", "FINISHED"]


def _states(folder: RunFolder) -> list[str]:
    import warnings

    from mlflow.tracking import MlflowClient

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        client = MlflowClient(f"sqlite:///{folder.trackers.absolute() / 'mlflow.db'}")
        return sorted(run.info.status for run in client.search_runs(["1"]))


def test_a_training_s_files_for_tensorboard_are_not_written_twice(
    tmp_path: Path, muster_cli: MusterCli
) -> None:
    few = ("--max-steps", "4", "--devices", "cpu:1", "--monitor-interval", "0", "--quiet")
    for name, words in (("inside", ()), ("outside", ("--no-tensorboard",))):
        train = ("train", "digits", *few, "--run-dir", name, "--log-to", "tensorboard", *words)
        assert muster_cli(*train).returncode == 0
        assert muster_cli("track", name, "--log-to", "tensorboard").returncode == 0
        found = in_tensorboard(RunFolder(tmp_path / name))[""]
        # A training writes a few steps a second itself, but each of its evaluations.
        assert [step for step, _ in found["evaluation/loss"]] == [4], name
        assert len(found["train/loss"]) == len(dict(found["train/loss"])), name
    assert len(found["train/loss"]) == 4, "from outside every step is written"
    assert not (tmp_path / "inside" / "trackers" / "tensorboard.jsonl").exists()


@pytest.mark.parametrize("name", READERS)
def test_hostile_names_and_numbers_and_folds_that_have_the_same_steps(
    tmp_path: Path, name: str
) -> None:
    names = ["_step", "step2", "loss²", "a b", "-x2d-", "/a/../b", "Δ/\u202eloss"]
    hostile = {"step": 3, **dict.fromkeys(names, 1.5), "nan": math.nan, "inf": math.inf}
    folds = [
        {"step": step, "_time": 10.0 * fold + step, "loss": fold + step / 4}
        for fold in range(2)
        for step in range(3)
    ]
    folder = gang_folder(tmp_path / "run ²'x", [*folds, hostile], "run")
    said: list[str] = []
    assert track(folder, [name], said.append) == [], said
    found = logged(READERS[name](folder))[""]
    expected = sorted((step, fold + step / 4) for fold in range(2) for step in range(3))
    assert found.pop("loss") == expected
    assert found.keys() == {*names, "nan", "inf"}
    assert {value for key in names for value in found[key]} == {(3, 1.5)}


def test_a_w_and_b_that_writes_nothing_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from muster.api.trackers import to_wandb
    from muster.api.trackers.to_wandb import Log

    monkeypatch.setattr(to_wandb, "_LONGEST_SILENCE_S", 0.1)
    run = object.__new__(to_wandb.WandbRun)
    run._log, run._rows, run._written = Log(tmp_path / "none"), 1, 0
    with pytest.raises(SetupError, match="1 row"):
        run.settle()


def test_a_point_is_in_the_log_of_w_and_b_long_before_it_writes_that_by_itself(
    tmp_path: Path,
) -> None:
    wandb = pytest.importorskip("wandb")
    from muster.api.trackers.to_wandb import WandbRun
    from muster.api.trackers.tracker import Point, Tracked

    run = WandbRun(wandb, tmp_path, Tracked(id="a1", name="a", group="g"))
    try:
        run.log([Point("loss", 1, time.time(), 0.5)])
        began_s = time.monotonic()
        run.settle()
        assert time.monotonic() - began_s < 10, "it writes every 15 s unless it is told"
    finally:
        run.leave()
        wandb.teardown()


@pytest.fixture
def mlflow_server(tmp_path: Path) -> Iterator[str]:
    """MLflow's own server with SQLite on loopback."""
    port = free_port()
    words = ("server", "--backend-store-uri", f"sqlite:///{tmp_path / 'server.db'}")
    place = ("--host", "127.0.0.1", "--port", str(port), "--workers", "1")
    server = subprocess.Popen(
        [sys.executable, "-m", "mlflow", *words, *place],
        cwd=tmp_path, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    uri, is_up = f"http://127.0.0.1:{port}", False
    try:
        while not is_up:
            assert server.poll() is None, "the server has ended"
            time.sleep(0.2)
            with suppress(OSError), urllib.request.urlopen(f"{uri}/health") as answer:
                is_up = answer.status == 200
        yield uri
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


@pytest.mark.slow
def test_two_runs_at_once_into_one_experiment_of_a_server(
    tmp_path: Path, mlflow_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_server)
    lines = [{"kind": "train", "step": step, "loss": step / 4} for step in range(1500)]
    folders = [gang_folder(tmp_path / name, lines) for name in ("one", "two")]
    commands = [
        subprocess.Popen([sys.executable, "-m", "muster", "track", folder.path, "--log-to=mlflow"])
        for folder in folders
    ]
    assert [command.wait() for command in commands] == [0, 0]
    expected = {"": {"train/loss": [(step, step / 4) for step in range(1500)]}}
    for folder in folders:
        assert in_mlflow(folder, mlflow_server) == expected


@pytest.mark.quick
def test_a_tracker_that_is_not_installed_starts_nothing(
    tmp_path: Path, muster_main: MusterCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "curve.py").write_text(PROGRAM)
    real: Callable[..., object] = importlib.util.find_spec

    def find(name: str, package: str | None = None) -> object:
        return None if name == "wandb" else real(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    words = ("sweep", "curve.py:curve", "--grid", "lr=1", "--run-dir", "run", "--log-to", "wandb")
    for more in ((), ("--dry-run",)):
        done = muster_main(*words, *more)
        assert done.returncode == 2
        assert "--log-to wandb needs the package wandb" in done.stderr
        assert "pip install 'muster-gpu[wandb]'" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.quick
def test_a_tracker_of_another_name(tmp_path: Path, muster_main: MusterCli) -> None:
    done = muster_main("sweep", "curve.py:curve", "--log-to", "wanbd")
    assert done.returncode == 2
    assert "did you mean 'wandb'?" in done.stderr
